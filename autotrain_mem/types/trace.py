"""A trace records a run: every device allocation and free, in order."""

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
"""The event of a ``torch.cuda.empty_cache()``: what is reserved and not allocated goes back to the device."""


class EngineMark(StrEnum):
    """Holds what a colocated vLLM engine does between two events: its share of the device is taken, or given back."""

    WAKES = "wakes"
    SLEEPS = "sleeps"


class Owner(StrEnum):
    """Names to whom the bytes of a block belong."""

    WEIGHTS = "weights"
    """Parameters and buffers of the model, adapters included."""
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    GATHERED_WEIGHTS = "gathered_weights"
    """Weights of a layer, whole, while it computes: the processes hold shards of them (FSDP)."""
    KV_CACHE = "kv_cache"
    """Keys and values of the tokens so far, while completions are generated."""
    ACTIVATIONS = "activations"
    """Made by a forward pass (or its recomputation) and kept beyond it, for the backward pass."""
    TEMPORARY = "temporary"
    """Made and freed within one stretch of forward, backward or optimizer step."""
    OTHER = "other"
    """Whatever is none of these: the batch itself, metrics, running loss."""


class Block(NamedTuple):
    """Records one allocation: ``size_bytes`` as requested, before any rounding."""

    size_bytes: int
    owner: Owner
    module: str
    """Qualified name of the parameter it is, or of the module whose forward made it; empty when neither."""
    stream: int = 0
    """Where it is allocated: 0 is the default stream. The allocator hands a block out again on its own stream only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Counts a model's parameters, as they were when the trainer had been built; the elements of quantized weights
    count, not their bytes.

    >>> from autotrain_mem import Trained
    >>> round(Trained(parameters=8_798_208, of_parameters=502_830_976, dtype="float32").share, 4)
    0.0175
    """

    parameters: int
    """The number of trained parameters."""
    of_parameters: int
    """All, adapters included."""
    dtype: str
    """The dtype of the trained parameters, or of most of them."""

    @property
    def share(self) -> float:
        """Returns the share of all parameters that is trained."""
        return self.parameters / max(self.of_parameters, 1)

    @property
    def bytes(self) -> int:
        """Returns those of the parameters that are trained, and so of their gradients."""
        return self.parameters * (4 if self.dtype == "float32" else 2)

    @staticmethod
    def extrapolated(short: Trained | None, long: Trained | None, copies: int, all_copies: int) -> Trained | None:
        """Counts those of the whole model, by two copies of few layers: exact, since each layer adds as many.

        Args:
            copies: By how many periods of layers ``long`` is longer than ``short``.
            all_copies: By how many the whole is.
        """
        if short is None or long is None:
            return None
        pairs = (short.parameters, long.parameters), (short.of_parameters, long.of_parameters)
        parameters, of_parameters = (few + (more - few) * all_copies // copies for few, more in pairs)
        return Trained(parameters=parameters, of_parameters=of_parameters, dtype=long.dtype)


class StreamUse(NamedTuple):
    """Records that a block is used on a stream that is not its own (``torch.Tensor.record_stream``).

    When it dies, it may not be handed out again before that stream has done what was asked of it by then.
    """

    event: int
    """Comes before the event of this index; after all of them where there is none."""
    block: int
    """``n`` for ``blocks[n - 1]``, as among the events."""
    stream: int


class LossPass(NamedTuple):
    """Records one pass over the chunks of a loss, forward or backward."""

    start: int
    """Index of its first event."""
    stop: int
    """Index of the first event behind it."""
    chunks: int
    """How many it went over, as it was rehearsed."""
    operators: int
    """How many were dispatched in it."""


class Routing(StrEnum):
    """Describes how a mixture's tokens are routed to its experts, as far as memory depends on it."""

    ANY = "any"
    """All tokens with all their choices are computed at once, so that it does not."""
    ONE = "one"
    """Every token chose the same experts."""
    EVEN = "even"
    """Every expert has as many tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Holds every allocation and free of one run, in order.

    ``events`` holds ``+n`` for the birth and ``-n`` for the death of block ``blocks[n - 1]``, and ``CACHE_EMPTIED``
    between them. A storage that is resized dies and is born again as a new block. A block may be born again once it
    is dead: steps of a generation that are not rehearsed are written as repetitions of one that is. ``phase_starts``
    lists (index of the first event, phase).
    """

    blocks: tuple[Block, ...]
    events: Events
    phase_starts: tuple[tuple[int, Phase], ...]
    operators: int
    """How many operators were dispatched."""
    seconds: float
    """Wall time of the recorded run."""
    stream_uses: tuple[StreamUse, ...] = ()
    """Uses on other streams, in order."""
    not_counted: tuple[str, ...] = ()
    """What is known to be missing, each in a sentence."""
    work: Workload = field(default_factory=Workload)
    """What it computed and moved, for the time that it takes."""
    loss_chunks: tuple[int, ...] = ()
    """How many chunks a loss would have had that was rehearsed with fewer: every number that occurred."""
    loss_passes: tuple[LossPass, ...] = ()
    """In the order in which they happened; none where the whole was extrapolated."""
    pinned_bytes: int = 0
    """What it took of pinned host memory, for activations and an optimizer that are kept there."""
    unpinned_bytes: int = 0
    """The most that DeepSpeed's offload took of other host memory at once."""
    nvme_bytes: int = 0
    """What DeepSpeed's offload wrote to files on a disk, which stay as long as it trains."""
    saved_model_bytes: int = 0
    """What was trained, on disk: all weights, or those of the adapter."""
    saved_state_bytes: int = 0
    """The optimizer's state, which a checkpoint holds beside."""
    unquantized_bytes: int = 0
    """Bytes of a quantized model that bitsandbytes leaves as they were: experts that are fused into one tensor a
    layer."""
    trained: Trained | None = None
    """None where no trainer was built for it."""
    routing: Routing | None = None
    """How tokens were routed to experts; None where there are none, or where the model's own code does it unseen."""
    engine_marks: tuple[tuple[int, EngineMark], ...] = ()
    """(Index of the event before which it happens, what a colocated engine does); none where it never sleeps."""

    def awake(self) -> Iterator[range]:
        """Yields the stretches of events while which a colocated engine is awake: it sleeps as the run begins."""
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
        """Yields (phase, +1 for a birth or -1 for a death, block) for every birth and death."""
        starts = iter((*self.phase_starts, (len(self.events) + 1, Phase.SAVE)))
        phase = Phase.LOAD
        following, following_phase = next(starts)
        for index, event in enumerate(self.events):
            while index >= following:
                phase = following_phase
                following, following_phase = next(starts)
            if event != CACHE_EMPTIED:
                yield phase, (1 if event > 0 else -1), self.blocks[abs(event) - 1]
