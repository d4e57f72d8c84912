"""Computes a run's report from the events of its processes, and records them in ``events.jsonl``."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotrain_mem.support import codec
from autotrain_mem.support.files import JsonLines
from autotrain_mem.training.rank_processes import Event
from autotrain_mem.types import REWARD_NAMES, MemoryReading, Plan, Report
from autotrain_mem.types.experience import EVENTS_NAME


@dataclass(kw_only=True)
class RunFigures:
    """Holds the figures of a run, over all its processes."""

    _losses: list[float] = field(default_factory=list)
    _mean_loss: float | None = None
    """The only loss of a run that is shorter than ``--logging_steps``."""
    _rewards: list[float] = field(default_factory=list)
    _began: list[tuple[int, float]] = field(default_factory=list)
    """The first step of each process, and the time of its start."""
    _started_at: str = field(default_factory=lambda: _now())
    _before: MemoryReading | None = None
    """The readings of earlier processes with the same settings."""
    _reading: MemoryReading | None = None
    """The last reading of the current process."""
    _not_finite_step: int | None = None
    _longest_rows_first: bool = False

    def see(self, event: Event) -> None:
        match event["event"]:
            case "start":
                self._began.append((event["step"], time.perf_counter()))
                if self._not_finite_step is not None and event["step"] < self._not_finite_step:
                    self._not_finite_step = None  # it resumes from a checkpoint before that step
            case "step" if event["memory"] is not None:
                self._reading = codec.from_json(MemoryReading, event["memory"])
            case "log" if self._not_finite_step is None:
                logs = event["logs"]
                self._losses += [logs["loss"]] if "loss" in logs else []
                self._mean_loss = logs.get("train_loss", self._mean_loss)
                self._rewards += [logs[name] for name in REWARD_NAMES if name in logs]
            case "not_finite" if event["spoils"]:
                self._not_finite_step = event["step"]
            case "worst_batch":
                self._longest_rows_first = not event["why_not"]
            case "restart":  # other settings have another prediction
                self._before = None if event["restart"]["change"] else _together(self._before, self._reading)
                self._reading, self._longest_rows_first = None, False

    def report(self, end: Event, plan: Plan, output_dir: str) -> Report:
        """Reports on all processes of the run, including the time between them."""
        began_at, began = self._began[0] if self._began else (0, time.perf_counter())
        seconds = time.perf_counter() - began if len(self._began) > 1 else end["seconds"]
        has_trained = end["steps"] != began_at
        losses, rewards = self._losses, self._rewards
        if has_trained and not losses and self._mean_loss is not None:
            losses = [self._mean_loss]
        last = self._began[-1][0] if self._began else 0
        if end["memory"] is not None and end["steps"] != last:
            self._reading = codec.from_json(MemoryReading, end["memory"])
        estimate = plan.estimate
        return Report(
            output_dir=output_dir,
            steps=end["steps"],
            began_at=began_at,
            knobs=plan.knobs,
            trained=estimate.memory.trained,
            schedule=plan.schedule,
            step_tokens=estimate.time.tokens,
            first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses and self._not_finite_step is None else None,
            not_finite_step=self._not_finite_step,
            first_reward=rewards[0] if rewards else None,
            last_reward=rewards[-1] if rewards else None,
            predicted_peak_bytes=estimate.reserved.peak_allocated_bytes,
            predicted_peak_reserved_bytes=estimate.reserved_bytes,
            measured=_together(self._before, self._reading) if has_trained else None,
            budget_bytes=estimate.reservable_bytes,
            longest_rows_first=self._longest_rows_first,
            seconds=round(seconds, 3),
            incidents=len(plan.experience.incidents),
            restarts=len(plan.experience.restarts),
            started_at=self._started_at,
            ended_at=_now(),
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _together(before: MemoryReading | None, now: MemoryReading | None) -> MemoryReading | None:
    """Merges consecutive readings: the largest peaks, the sum of retries, otherwise the last values."""
    if before is None or now is None:
        return now or before
    return replace(
        now,
        peak_allocated_bytes=max(before.peak_allocated_bytes, now.peak_allocated_bytes),
        peak_reserved_bytes=max(before.peak_reserved_bytes, now.peak_reserved_bytes),
        num_alloc_retries=before.num_alloc_retries + now.num_alloc_retries,
    )


STEP_SECONDS, STEP_SHARE = 1.0, 1 / 2000
"""Recorded steps are at least a second apart (watchers read once a second), and at least this share of the elapsed
time, so that a week writes about 13,000 lines."""
_KEPT = (
    *("start", "step", "log", "incident", "restart", "checkpoint", "save_failed", "sign", "note", "not_finite"),
    *("worst_batch", "interrupted", "end"),
)


@dataclass(slots=True)
class EventLog:
    """Appends a line to ``events.jsonl`` for each event worth recording."""

    folder: Path
    _began: float = field(default_factory=time.time)
    _step_written: float = 0.0
    _is_broken: bool = False

    def see(self, event: Mapping[str, Any]) -> None:
        """Writes an event. After an OSError, such as a full disk, nothing more is written."""
        kind, now = event["event"], time.time()
        if kind not in _KEPT or self._is_broken:
            return
        if kind == "step":
            if now - self._step_written < max(STEP_SECONDS, STEP_SHARE * (now - self._began)):
                return
            self._step_written = now
        if kind == "log":  # JSON has no NaN, and the watch keeps its own record
            logs = event["logs"].items()
            known = {name: each for name, each in logs if math.isfinite(each) and not name.startswith("memory/")}
            event = {**event, "logs": known}
        try:
            JsonLines(self.folder / EVENTS_NAME).write({**event, "time": round(now, 3)})
        except OSError:
            self._is_broken = True

    def end(self, ending: str, step: int | None = None, why: str = "") -> None:
        """Records how the run ended (``finished``, ``interrupted`` or ``failed``), and the error that ended it."""
        self.see({"event": "end", "ending": ending, "step": step, "why": why})
