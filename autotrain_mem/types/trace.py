"""Defines the trace of a run: its allocations and frees of device memory, in order."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, NamedTuple

from autotrain_mem.types.work import Phase, Workload

if TYPE_CHECKING:
    Events = array[int]
else:  # Python 3.11 cannot subscript it
    Events = array

CACHE_EMPTIED = 0
"""The event of ``torch.cuda.empty_cache()``, which returns unallocated segments to the device."""


class EngineMark(StrEnum):
    """Names an event of a colocated vLLM engine."""

    WAKES = "wakes"
    """The engine takes its share of the device."""
    SLEEPS = "sleeps"
    """The engine releases its share."""


class Owner(StrEnum):
    """Names the purpose of a block."""

    WEIGHTS = "weights"
    """Parameters and buffers of the model, adapters included."""
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    GATHERED_WEIGHTS = "gathered_weights"
    """The full weights of a layer while it computes, gathered from shards (FSDP)."""
    KV_CACHE = "kv_cache"
    """The keys and values of the tokens so far, during generation."""
    ACTIVATIONS = "activations"
    """Tensors that a forward pass (or its recomputation) keeps for the backward pass."""
    TEMPORARY = "temporary"
    """Tensors allocated and freed within one forward, backward or optimizer step."""
    OTHER = "other"
    """Everything else: the batch itself, metrics, the running loss."""


class Block(NamedTuple):
    """Records one allocation."""

    size_bytes: int
    """The requested size, before the allocator rounds it up."""
    owner: Owner
    module: str
    """The qualified name of the parameter, or of the module whose forward allocated the block; empty if neither."""
    stream: int = 0
    """The stream on which it was allocated; 0 is the default. The allocator reuses a block only on its own stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Holds a model's numbers of parameters once the trainer is built. Quantized weights count by elements, not bytes.

    >>> from autotrain_mem import Trained
    >>> round(Trained(parameters=8_798_208, of_parameters=502_830_976, dtype="float32").share, 4)
    0.0175
    """

    parameters: int
    """The number of trained parameters."""
    of_parameters: int
    """The number of all parameters, adapters included."""
    dtype: str
    """The dtype of most trained parameters."""

    @property
    def share(self) -> float:
        """Computes the share of the parameters that are trained."""
        return self.parameters / max(self.of_parameters, 1)

    @property
    def bytes(self) -> int:
        """Computes the bytes of the trained parameters. Their gradients have the same size."""
        return self.parameters * (4 if self.dtype == "float32" else 2)

    @staticmethod
    def extrapolated(short: Trained | None, long: Trained | None, copies: int, all_copies: int) -> Trained | None:
        """Computes the whole model's numbers from two truncated copies. They are exact: all periods add equally many.
        ``copies``: the periods of layers that ``long`` has in addition to ``short``. ``all_copies``: the periods of
        layers that the whole model has in addition to ``short``."""
        if short is None or long is None:
            return None
        pairs = (short.parameters, long.parameters), (short.of_parameters, long.of_parameters)
        parameters, of_parameters = (few + (more - few) * all_copies // copies for few, more in pairs)
        return Trained(parameters=parameters, of_parameters=of_parameters, dtype=long.dtype)


class StreamUse(NamedTuple):
    """Records the use of a block on another stream (``torch.Tensor.record_stream``).

    The allocator does not reuse a freed block before that stream has finished the work that was queued at the free.
    """

    event: int
    """The index of the next event; the number of events if there is none."""
    block: int
    """The block's number: ``n`` means ``blocks[n - 1]``, as in the events."""
    stream: int


class LossPass(NamedTuple):
    """Records one pass over the chunks of a loss, forward or backward."""

    start: int
    """The index of the pass's first event."""
    stop: int
    """The index of the first event after the pass."""
    chunks: int
    """The number of rehearsed chunks."""
    operators: int
    """The number of operators dispatched in the pass."""


class Routing(StrEnum):
    """Names how tokens are routed to the experts of a mixture, on which memory can depend."""

    ANY = "any"
    """The tokens of all experts are computed at once, so that memory does not depend on the routing."""
    ONE = "one"
    """Every token chose the same experts."""
    EVEN = "even"
    """Every expert got equally many tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Holds what a rehearsal finds out beside the allocations on the device; an estimate takes it over as it is."""

    not_counted: tuple[str, ...] = ()
    """The parts of the run's memory or time that are left out, each described in a phrase."""
    pinned_host_bytes: int = 0
    """The bytes of pinned host memory per process, for offloaded activations, optimizer state and shards."""
    unpinned_host_bytes: int = 0
    """The peak bytes of other host memory per process, that an optimizer on the host needs, with its state."""
    saved_model_bytes: int = 0
    """The bytes on disk of the saved model: all weights, or those of the adapter."""
    saved_state_bytes: int = 0
    """The bytes on disk of the optimizer state in a checkpoint."""
    unquantized_bytes: int = 0
    """The bytes of experts that bitsandbytes leaves unquantized, since they are fused into one tensor."""
    trained: Trained | None = None
    """The numbers of trained and of all parameters; None if no trainer was built."""
    routing: Routing | None = None
    """How tokens were routed to experts; None without experts, or if the model routes by code outside transformers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace(RunFacts):
    """Holds every allocation and free of one run, in order.

    In ``events``, ``+n`` is the allocation and ``-n`` the free of ``blocks[n - 1]``; ``0`` is ``CACHE_EMPTIED``.
    A resized storage is freed and allocated again as a new block. ``phase_starts`` lists (index of the phase's first
    event, phase).
    """

    blocks: tuple[Block, ...]
    events: Events
    phase_starts: tuple[tuple[int, Phase], ...]
    operators: int
    """The number of dispatched operators."""
    seconds: float
    """The wall time of the recorded run."""
    stream_uses: tuple[StreamUse, ...] = ()
    """The uses of blocks on other streams, in order."""
    work: Workload = field(default_factory=Workload)
    """The computation and transfers, from which time is estimated."""
    loss_chunks: tuple[int, ...] = ()
    """The real numbers of chunks of all losses that were rehearsed with fewer chunks, without duplicates."""
    loss_passes: tuple[LossPass, ...] = ()
    """The passes over the chunks of losses, in order; empty if the trace was extrapolated."""
    marks: tuple[tuple[int, EngineMark | int], ...] = ()
    """Pairs of the next event's index and what begins: a change of a colocated engine, or a decode step of
    ``generate()``, as the number of tokens that its rows have. Between two marks whose tokens differ by more than one,
    the events replace skipped decode steps (``estimator/decode_steps.py``)."""

    def awake(self) -> Iterator[range]:
        """Yields the ranges of event indices in which a colocated engine is awake. It is asleep at the start."""
        began: int | None = None
        for index, mark in self.marks:
            if mark is EngineMark.WAKES and began is None:
                began = index
            elif mark is EngineMark.SLEEPS and began is not None:
                yield range(began, index)
                began = None
        if began is not None:
            yield range(began, len(self.events))

    def phases(self) -> Iterator[Phase]:
        """Yields the phase of each event, in order."""
        starts = ((0, Phase.LOAD), *self.phase_starts, (len(self.events), Phase.SAVE))
        for (start, phase), (stop, _) in pairwise(starts):
            yield from repeat(phase, stop - start)

    def walk(self) -> Iterator[tuple[Phase, int, Block]]:
        """Yields (phase, +1 for an allocation or -1 for a free, block) for each allocation and free, in order."""
        for phase, event in zip(self.phases(), self.events, strict=True):
            if event != CACHE_EMPTIED:
                yield phase, (1 if event > 0 else -1), self.blocks[abs(event) - 1]
