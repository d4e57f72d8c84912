"""Carries what the parent and a run's process say to each other: the request, and events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autotrain_mem.support.errors import InterruptedByUser
from autotrain_mem.training.pulses import SILENT_SECONDS
from autotrain_mem.types import Hardware, Job, Knobs, LearnedLimits, Lever, Phase

Task = Literal["train", "probe"]

SendEvent = Callable[[Mapping[str, Any]], None]
"""Sends one event from a run's process to its parent."""


def interrupted_before_training() -> InterruptedByUser:
    """The error of a Ctrl-C that came before the first step."""
    return InterruptedByUser(
        "Interrupted before training began; no step was trained.", hint="Run the command again when you like."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The parent's request, one line of JSON."""

    task: Task
    job: Job
    knobs: Knobs
    hardware: Hardware
    simulate: bool
    output_dir: str
    run: str = ""
    """The id of the run, which its checkpoints carry; empty for a probe."""
    folder: str = ""
    """The identity of the output folder (``run_folder.check_in_place``)."""
    learned: LearnedLimits = field(default_factory=LearnedLimits)
    """What the guards of earlier runs learned."""
    predicted: Mapping[Phase, int] = field(default_factory=dict)
    """Peak allocated bytes of each phase, by the plan."""
    predicted_reserved_bytes: int | None = None
    """Peak that is reserved, by the plan."""
    budget_bytes: int | None = None
    """Bytes that torch's allocator may take of the device, by the plan."""
    level: str = ""
    """The plan's level of harm; empty where there is none."""
    levers: tuple[Lever, ...] = ()
    """The changes of the plan."""
    guarded: bool = True
    """Whether a guard is attached; else it trains as TRL does, and fails when out of memory."""
    rank: int = 0
    """The rank of the process that is asked."""

    @property
    def processes_here(self) -> int:
        """The number of processes of each machine."""
        return min(self.knobs.processes, max(1, self.hardware.topology.devices))

    @property
    def silent_seconds(self) -> float:
        """Seconds that several processes may train without progress."""
        return float(self.job.arguments.get("ddp_timeout") or SILENT_SECONDS)

    def of_rank(self, rank: int) -> Request:
        """Returns the request of one process, with its own device; other machines name theirs."""
        uuids = self.hardware.topology.uuids
        if self.knobs.processes == 1 or rank >= len(uuids):
            return replace(self, rank=rank)
        return replace(self, rank=rank, hardware=replace(self.hardware, uuid=uuids[rank]))
