"""Defines the messages between the parent and a run's process: the request, and events."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeVar

from autotrain_mem.support.errors import InterruptedByUser
from autotrain_mem.training.pulses import SILENT_SECONDS
from autotrain_mem.types import Hardware, Job, Knobs, LearnedLimits, MemoryReading, Phase, PhasePeak

Task = Literal["train", "probe"]
Figures = TypeVar("Figures", MemoryReading, PhasePeak)

SendEvent = Callable[[Mapping[str, Any]], None]
"""Sends one event from a run's process to its parent."""


def interrupted_before_training() -> InterruptedByUser:
    """Returns the error for a Ctrl-C before the first step."""
    return InterruptedByUser(
        "Interrupted before training began; no step was trained.", hint="Run the command again at any time."
    )


def largest(readings: Sequence[Figures]) -> Figures:
    """Merges readings of several ranks or moments: the largest of each figure."""
    names = [each.name for each in fields(readings[0])]
    return replace(readings[0], **{name: max(getattr(each, name) for each in readings) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The parent's request, sent as one line of JSON."""

    task: Task
    job: Job
    knobs: Knobs
    hardware: Hardware
    simulate: bool
    output_dir: str
    run: str = ""
    """The id of the run, which goes into its checkpoints; empty for a probe."""
    folder: str = ""
    """The identity of the output folder (``run_folder.check_in_place``)."""
    learned: LearnedLimits = field(default_factory=LearnedLimits)
    """The limits that the guards of earlier runs learned."""
    predicted: Mapping[Phase, int] = field(default_factory=dict)
    """The planned peak of allocated bytes, by phase."""
    predicted_reserved_bytes: int | None = None
    """The planned peak of reserved bytes."""
    budget_bytes: int | None = None
    """The bytes of the device that the plan leaves to torch's allocator."""
    guarded: bool = True
    """Whether to attach the guard, the watch and the run of the longest rows. If False, training is exactly TRL's."""
    rank: int = 0
    """The rank of the process that gets the request."""

    @property
    def processes_here(self) -> int:
        """The number of processes on each machine."""
        return min(self.knobs.processes, max(1, self.hardware.topology.devices))

    @property
    def silent_seconds(self) -> float:
        """Seconds without progress after which a run of several processes counts as hung."""
        return float(self.job.arguments.get("ddp_timeout") or SILENT_SECONDS)

    def of_rank(self, rank: int) -> Self:
        """Returns the request for one process, with its own device; other machines fill in their devices."""
        uuids = self.hardware.topology.uuids
        if self.knobs.processes == 1 or rank >= len(uuids):
            return replace(self, rank=rank)
        return replace(self, rank=rank, hardware=replace(self.hardware, uuid=uuids[rank]))
