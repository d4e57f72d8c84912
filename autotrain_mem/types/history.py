"""A history says how a run went, moment by moment, as the files in its output folder tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotrain_mem.types.experience import PhasePeak
from autotrain_mem.types.report import MemoryReading
from autotrain_mem.types.work import Phase

RECORD_NAME = "memory.jsonl"
"""The file in the output folder that the watch writes (``training.watch``); ``memory.rank1.jsonl`` is rank 1's."""
EVENTS_NAME = "events.jsonl"
"""The file in the output folder that has what befell the run: starts, checkpoints, incidents, restarts, its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Holds what was measured and logged at one step of one process."""

    seconds: float
    """Since the run's first event."""
    step: int
    device: MemoryReading | None
    tokens_per_second: float | None
    logs: Mapping[str, float]
    """What the trainer logged, under its own names: ``loss``, ``learning_rate``, ``grad_norm``, ``reward``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Happening:
    """Marks a moment of a run at which something happened.

    >>> from autotrain_mem.types.history import Happening
    >>> Happening(seconds=12.5, step=7, kind="out of memory", text="batch split in two").step
    7
    """

    seconds: float
    step: int
    kind: str
    """``start``, ``checkpoint``, ``out of memory``, ``restart``, ``warning`` or ``end``."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """Holds a run from its first event to its last, or to now."""

    began: float
    """Seconds since the epoch of the first event."""
    last: float
    """Seconds since the epoch of the last event."""
    total_steps: int | None
    """Optimizer steps that the training is to have; None where that is not written."""
    total_bytes: int | None
    """Of the device."""
    predicted_bytes: Mapping[Phase, int]
    """Peak of what is allocated in each phase."""
    phases: Mapping[Phase, PhasePeak]
    """Peaks of each phase so far, measured in the first process."""
    ranks: tuple[tuple[Moment, ...], ...]
    """Of each process, the first one's at least; in the order of time."""
    happenings: tuple[Happening, ...]
    """In the order of time."""
    ending: str
    """How the run ended: ``finished``, ``interrupted``, ``failed``; empty where nothing says that it did."""

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Returns those of the first process."""
        return self.ranks[0]
