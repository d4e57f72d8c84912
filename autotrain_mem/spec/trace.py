"""A recorded run: every device allocation and free, in order."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Where in the run an event happened."""

    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer_step"
    EVALUATE = "evaluate"
    SAVE = "save"


class Owner(StrEnum):
    """To whom the bytes of a block belong."""

    WEIGHTS = "weights"
    """Parameters and buffers of the model, adapters included."""
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    """Made by a forward pass (or its recomputation) and kept beyond it, for the backward pass."""
    TEMPORARY = "temporary"
    """Made and freed within one stretch of forward, backward or optimizer step."""
    OTHER = "other"
    """Whatever is none of these: the batch itself, metrics, running loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One allocation: ``size_bytes`` as requested, before any rounding."""

    size_bytes: int
    owner: Owner
    module: str
    """Qualified name of the parameter it is, or of the module whose forward made it; empty when neither."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Every allocation and free of one run, in order.

    ``events`` holds ``+n`` for the birth and ``-n`` for the death of block ``blocks[n - 1]``. A storage that is
    resized dies and is born again as a new block. ``phase_starts`` lists (index of the first event, phase).
    """

    blocks: tuple[Block, ...]
    events: array[int]
    phase_starts: tuple[tuple[int, Phase], ...]
    operators: int
    """How many operators were dispatched."""
    seconds: float
    """Wall time of the recorded run."""
    not_counted: tuple[str, ...] = ()
    """What is known to be missing, each in a sentence."""

    def walk(self) -> Iterator[tuple[Phase, int, Block]]:
        """Yield (phase, +1 for a birth or -1 for a death, block) for every event."""
        starts = iter((*self.phase_starts, (len(self.events) + 1, Phase.SAVE)))
        phase = Phase.LOAD
        following, following_phase = next(starts)
        for index, event in enumerate(self.events):
            while index >= following:
                phase = following_phase
                following, following_phase = next(starts)
            yield phase, (1 if event > 0 else -1), self.blocks[abs(event) - 1]
