"""Carries what the parent and a run's process say to each other: the request, and events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autotrain_mem.errors import InterruptedByUser
from autotrain_mem.spec import Hardware, Job, Knobs, Learned, Phase

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
    """What the parent asks for, in one line of JSON."""

    task: Task
    job: Job
    knobs: Knobs
    hardware: Hardware
    simulate: bool
    output_dir: str
    learned: Learned = field(default_factory=Learned)
    """What runs before this one taught its guard."""
    predicted: Mapping[Phase, int] = field(default_factory=dict)
    """Peak allocated bytes of each phase, by the plan."""
    guarded: bool = True
    """Else it trains as TRL does by itself, and ends when the device is full."""

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "job": self.job.to_json(),
            "knobs": self.knobs.to_json(),
            "hardware": self.hardware.to_json(),
            "simulate": self.simulate,
            "output_dir": self.output_dir,
            "learned": self.learned.to_json(),
            "guarded": self.guarded,
            "predicted": {str(phase): peak_bytes for phase, peak_bytes in self.predicted.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Request:
        """Read what :meth:`to_json` wrote."""
        return cls(
            task=values["task"],
            job=Job.from_json(values["job"]),
            knobs=Knobs.from_json(values["knobs"]),
            hardware=Hardware.from_json(values["hardware"]),
            simulate=values["simulate"],
            output_dir=values["output_dir"],
            learned=Learned.from_json(values["learned"]),
            guarded=values["guarded"],
            predicted={Phase(name): peak_bytes for name, peak_bytes in values["predicted"].items()},
        )
