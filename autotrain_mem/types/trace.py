"""Defines the trace of a run: every device allocation and free, in order."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from autotrain_mem.types.work import Phase, Workload

if TYPE_CHECKING:
    Events = array[int]
else:  # Python 3.11 cannot subscript it
    Events = array

CACHE_EMPTIED = 0
"""The event of ``torch.cuda.empty_cache()``, which releases unallocated segments to the device."""


class EngineMark(StrEnum):
    """Names when a colocated vLLM engine takes its share of the device, and when it releases it."""

    WAKES = "wakes"
    SLEEPS = "sleeps"


class Owner(StrEnum):
    """Names the purpose of a block's bytes."""

    WEIGHTS = "weights"
    """Parameters and buffers of the model, adapters included."""
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    GATHERED_WEIGHTS = "gathered_weights"
    """Full weights of a layer while it computes, gathered from shards (FSDP)."""
    KV_CACHE = "kv_cache"
    """Keys and values of the tokens so far during generation."""
    ACTIVATIONS = "activations"
    """Tensors that a forward pass (or its recomputation) keeps for the backward pass."""
    TEMPORARY = "temporary"
    """Tensors allocated and freed within one forward, backward or optimizer step."""
    OTHER = "other"
    """Everything else: the batch itself, metrics, the running loss."""


class Block(NamedTuple):
    """Records one allocation: ``size_bytes`` as requested, before any rounding."""

    size_bytes: int
    owner: Owner
    module: str
    """Qualified name of the parameter, or of the module whose forward allocated it; empty if there is neither."""
    stream: int = 0
    """The allocating stream; 0 is the default. The allocator reuses a block on its own stream only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Counts a model's parameters after the trainer is built; quantized weights count by elements, not bytes.

    >>> from autotrain_mem import Trained
    >>> round(Trained(parameters=8_798_208, of_parameters=502_830_976, dtype="float32").share, 4)
    0.0175
    """

    parameters: int
    """The number of trained parameters."""
    of_parameters: int
    """All parameters, adapters included."""
    dtype: str
    """The dtype of most trained parameters."""

    @property
    def share(self) -> float:
        """Returns the share of all parameters that is trained."""
        return self.parameters / max(self.of_parameters, 1)

    @property
    def bytes(self) -> int:
        """Returns the bytes of the trained parameters, which equal those of their gradients."""
        return self.parameters * (4 if self.dtype == "float32" else 2)

    @staticmethod
    def extrapolated(short: Trained | None, long: Trained | None, copies: int, all_copies: int) -> Trained | None:
        """Counts the whole model's parameters from two truncated copies: exact, since every layer adds as many.

        Args:
            copies: Periods of layers by which ``long`` is longer than ``short``.
            all_copies: Periods of layers by which the whole model is longer than ``short``.
        """
        if short is None or long is None:
            return None
        pairs = (short.parameters, long.parameters), (short.of_parameters, long.of_parameters)
        parameters, of_parameters = (few + (more - few) * all_copies // copies for few, more in pairs)
        return Trained(parameters=parameters, of_parameters=of_parameters, dtype=long.dtype)


class StreamUse(NamedTuple):
    """Records the use of a block on another stream (``torch.Tensor.record_stream``).

    After it is freed, it may not be reused until that stream has finished the work queued by then.
    """

    event: int
    """Index of the next event; past the end if there is none."""
    block: int
    """``n`` for ``blocks[n - 1]``, as in the events."""
    stream: int


class LossPass(NamedTuple):
    """Records one pass over the chunks of a loss, forward or backward."""

    start: int
    """Index of its first event."""
    stop: int
    """Index of the first event after it."""
    chunks: int
    """Number of rehearsed chunks."""
    operators: int
    """Number of operators dispatched in it."""


class Routing(StrEnum):
    """Names how tokens are routed to the experts of a mixture, if memory depends on it."""

    ANY = "any"
    """All experts' tokens are computed at once, so memory does not depend on the routing."""
    ONE = "one"
    """Every token chose the same experts."""
    EVEN = "even"
    """Every expert got equally many tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Holds every allocation and free of one run, in order.

    ``events`` holds ``+n`` for the allocation and ``-n`` for the free of block ``blocks[n - 1]``, and ``CACHE_EMPTIED``
    between them. A resized storage is freed and allocated again as a new block. A freed block may be allocated again:
    skipped steps of a generation repeat one. ``phase_starts`` lists (index of the first event, phase).
    """

    blocks: tuple[Block, ...]
    events: Events
    phase_starts: tuple[tuple[int, Phase], ...]
    operators: int
    """Number of dispatched operators."""
    seconds: float
    """Wall time of the recorded run."""
    stream_uses: tuple[StreamUse, ...] = ()
    """Uses on other streams, in order."""
    not_counted: tuple[str, ...] = ()
    """Known omissions, each a sentence."""
    work: Workload = field(default_factory=Workload)
    """Computation and transfers, from which time is estimated."""
    loss_chunks: tuple[int, ...] = ()
    """Full numbers of chunks of losses that were rehearsed with fewer: all distinct numbers."""
    loss_passes: tuple[LossPass, ...] = ()
    """Passes in order; empty if the trace was extrapolated."""
    pinned_bytes: int = 0
    """Pinned host memory for offloaded activations and optimizer state."""
    unpinned_bytes: int = 0
    """Peak of other host memory that DeepSpeed's offload took."""
    nvme_bytes: int = 0
    """Size of the files of DeepSpeed's NVMe offload, which stay until training ends."""
    saved_model_bytes: int = 0
    """Size on disk of the trained weights: all, or those of the adapter."""
    saved_state_bytes: int = 0
    """Size on disk of the optimizer state in a checkpoint."""
    unquantized_bytes: int = 0
    """Bytes of experts that bitsandbytes leaves unquantized, since they are fused into one tensor."""
    trained: Trained | None = None
    """None if no trainer was built."""
    routing: Routing | None = None
    """How tokens were routed to experts; None without experts, or if the model's own code routes them out of sight."""
    engine_marks: tuple[tuple[int, EngineMark], ...] = ()
    """(Index of the next event, what a colocated engine does); empty if the engine never sleeps."""

    def awake(self) -> Iterator[range]:
        """Yields the ranges of events during which a colocated engine is awake; it is asleep at the start."""
        began: int | None = None
        for index, mark in self.engine_marks:
            if mark is EngineMark.WAKES and began is None:
                began = index
            elif mark is EngineMark.SLEEPS and began is not None:
                yield range(began, index)
                began = None
        if began is not None:
            yield range(began, len(self.events))

    def walk(self) -> Iterator[tuple[Phase, int, Block]]:
        """Yields (phase, +1 for an allocation or -1 for a free, block) for each event in order."""
        starts = iter((*self.phase_starts, (len(self.events) + 1, Phase.SAVE)))
        phase = Phase.LOAD
        following, following_phase = next(starts)
        for index, event in enumerate(self.events):
            while index >= following:
                phase = following_phase
                following, following_phase = next(starts)
            if event != CACHE_EMPTIED:
                yield phase, (1 if event > 0 else -1), self.blocks[abs(event) - 1]
