"""Trains under a supervisor: starts each process, and writes what it teaches into ``plan.json``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotrain_mem.engine.output_dir import RESUME, resumes, write_run
from autotrain_mem.engine.recover.replan import flags_of, smallest_change, with_less_on_device, with_less_on_host
from autotrain_mem.engine.rehearsals import Rehearsals
from autotrain_mem.errors import AutofitError, GpuOutOfMemoryError, OutputFolderError
from autotrain_mem.report.shortage import explained
from autotrain_mem.spec import Hardware, Incident, Knobs, Plan, Report, codec
from autotrain_mem.spec.experience import Experience, Learned, Restart
from autotrain_mem.spec.length import without_wish
from autotrain_mem.spec.report import REWARD_NAMES, MemoryReading
from autotrain_mem.spec.shortage import Shortage
from autotrain_mem.training import launch
from autotrain_mem.training.checkpoints import (
    Checkpoint,
    discard,
    newest_start,
    set_torn_aside,
    step_of,
    steps_of,
    why_no_start,
    why_torn,
)
from autotrain_mem.training.environment import one_tracked_run, process_environment
from autotrain_mem.training.exit_causes import Cause, Ending, Remedy, cause_of
from autotrain_mem.training.launch import Event
from autotrain_mem.training.request import Request
from autotrain_mem.training.supervisor import Change, Stint, supervise
from autotrain_mem.worker.pool import Workers


@dataclass(kw_only=True)
class SupervisedRun:
    """One run in one folder; where a process dies, another goes on (``training.supervisor``)."""

    rehearsals: Rehearsals
    plan: Plan
    """What ``plan.json`` holds: with what the run taught, and the settings that it goes on with."""
    device: Hardware
    """That it trains on."""
    folder: Path
    """The output folder, which exists."""
    simulate: bool
    guarded: bool
    """Else the process trains as TRL does by itself."""
    on_event: Callable[[Mapping[str, Any]], None]
    interrupted: bool = False
    _first: Checkpoint | None = None
    _others: frozenset[int] = frozenset()
    _number: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self._course = _Course()

    def finish(self, *, restarts: int) -> Report:
        """Trains to the end, or until it is interrupted.

        Args:
            restarts: How often in a row without a new checkpoint.

        Raises:
            OutputFolderError: there is no whole checkpoint to go on from; the disk is full.
            GpuOutOfMemoryError, TrainingError, InterruptedByUser and what else ``supervise`` raises.
        """
        checkpoint = self.first_checkpoint()
        first = Stint(knobs=self.plan.knobs, learned=self.plan.experience.learned, checkpoint=checkpoint)
        end = supervise(first, self, restarts=restarts, on_event=self.record)
        self.interrupted = end["interrupted"]
        return self._report(end)

    # -- what the supervisor asks for ---------------------------------------------------------------------------------

    def train(self, stint: Stint, on_event: Callable[[Event], None]) -> Event | Ending:
        job = self.rehearsals.job
        arguments: dict[str, Any] = {**without_wish(job.arguments), RESUME: _text(stint.resume_from)}
        request = Request(
            task="train",
            job=replace(job, arguments=arguments),
            knobs=stint.knobs,
            hardware=self.device,
            simulate=self.simulate,
            output_dir=str(self.folder),
            learned=stint.learned,
            predicted=self.plan.estimate.memory.phases,
            guarded=self.guarded,
        )
        environment = process_environment(self.device, stint.knobs, job.environment, simulate=self.simulate)
        environment |= one_tracked_run(self._number, job.environment)
        return launch.train(request, environment, self.folder / launch.LOG_NAME, on_event)

    def newest(self, ending: Ending) -> Checkpoint | None:
        if ending.saving and why_torn(Path(ending.saving)):
            discard(Path(ending.saving))
        self._put_torn_aside()
        return newest_start(self.folder, ignoring=self._others) or self._first

    def changed(self, cause: Cause, ending: Ending, knobs: Knobs) -> Change | None:
        with Workers() as workers:
            rehearsals = replace(self.rehearsals, workers=workers)
            try:
                if cause.remedy is Remedy.LESS_HOST_MEMORY:
                    plan = with_less_on_host(rehearsals, self.plan)
                else:
                    others_bytes = _others_bytes(ending.error)
                    plan = with_less_on_device(rehearsals, self.plan, ending.peak_reserved_bytes, others_bytes)
            except AutofitError:
                return None  # the user reads what ended the training, not what came of the search for a way out
        if plan is None:
            return None
        self._keep(plan)
        return Change(knobs=plan.knobs, flags=flags_of(knobs, plan.knobs))

    def explained(self, ending: Ending) -> AutofitError:
        error = ending.error
        if cause_of(ending).remedy is Remedy.LESS_HOST_MEMORY:
            error.hint = f"{error.hint}\n{_HOST}".strip()
        if not isinstance(error, GpuOutOfMemoryError) or error.details is None:
            return error
        shortage = codec.from_json(Shortage, error.details)
        with Workers() as workers:
            nearest = smallest_change(replace(self.rehearsals, workers=workers), self.plan.estimate, shortage)
        return explained(shortage, self.plan, nearest)

    # -- what the processes report -------------------------------------------------------------------------------------

    def record(self, event: Event) -> None:
        """Keep what is to be kept, and pass it on."""
        experience = self.plan.experience
        match event["event"]:
            case "incident":
                experience = experience.with_incident(codec.from_json(Incident, event["incident"]))
                experience = experience.with_learned(codec.from_json(Learned, event["learned"]))
            case "restart":
                experience = experience.with_restart(codec.from_json(Restart, event["restart"]))
            case "checkpoint":
                self._others -= {event["step"]}
        if experience is not self.plan.experience:
            self._keep(replace(self.plan, experience=experience))
        self._course.record(event)
        self.on_event(event)

    def _keep(self, plan: Plan) -> None:
        self.plan = plan
        write_run(self.folder, plan_json=codec.to_json(plan))

    # -- what there is to go on from ----------------------------------------------------------------------------------

    def first_checkpoint(self) -> Checkpoint | None:
        """The one that the user wishes to resume from: the newest whole one of the folder, or the one that is named."""
        wish = self.rehearsals.job.arguments.get(RESUME)
        if not wish:
            return None
        if wish is not True:
            self._first = _named(Path(str(wish)))
            is_of_this_run = self._first.path.resolve().parent == self.folder.resolve()
            earlier = range(self._first.step + 1) if is_of_this_run else ()
            self._others = steps_of(self.folder).difference(earlier)
            return self._first
        self._put_torn_aside()
        self._first = newest_start(self.folder)
        if self._first is None:
            raise OutputFolderError(
                f"The output folder {self.folder} holds no whole checkpoint to resume from.",
                hint="Remove --resume_from_checkpoint and give another --output_dir, to start again.",
            )
        return self._first

    def _put_torn_aside(self) -> None:
        for message in set_torn_aside(self.folder):
            self.on_event({"event": "torn", "message": message})

    # -- what came of it ----------------------------------------------------------------------------------------------

    def _report(self, end: Event) -> Report:
        """Reports on all processes of the run."""
        course, estimate = self._course, self.plan.estimate.reserved
        losses, rewards = course.losses or end["losses"], course.rewards or end["rewards"]
        return Report(
            output_dir=str(self.folder),
            steps=end["steps"],
            first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses else None,
            first_reward=rewards[0] if rewards else None,
            last_reward=rewards[-1] if rewards else None,
            predicted_peak_bytes=estimate.peak_allocated_bytes,
            predicted_peak_reserved_bytes=estimate.peak_reserved_bytes,
            measured=course.measured(end),
            seconds=round(course.seconds(end["seconds"]), 3),
            incidents=len(self.plan.experience.incidents),
            restarts=len(self.plan.experience.restarts),
        )


class _Course:
    """Loss, reward and time over all processes of a run."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rewards: list[float] = []
        self._began: list[float] = []
        self._began_at = 0

    def record(self, event: Event) -> None:
        if event["event"] == "start":
            self._began.append(time.perf_counter())
            self._began_at = event["step"]
        elif event["event"] == "log":
            logs = event["logs"]
            self.losses += [logs["loss"]] if "loss" in logs else []
            self.rewards += [logs[name] for name in REWARD_NAMES if name in logs]

    def measured(self, end: Event) -> MemoryReading | None:
        """None as well where the last process found nothing left to train."""
        if end["memory"] is None or end["steps"] == self._began_at:
            return None
        return codec.from_json(MemoryReading, end["memory"])

    def seconds(self, of_last: float) -> float:
        """By the process's own clock where there was one; else from the first one's start to the end."""
        return of_last if len(self._began) < 2 else time.perf_counter() - self._began[0]


def _others_bytes(error: AutofitError) -> int:
    return 0 if error.details is None else codec.from_json(Shortage, error.details).others_bytes


_HOST = "--dataloader_num_workers 0 and settings without offloading take less of the host's memory."


def as_begun(chosen: Plan) -> Plan:
    """The plan as the output folder is to hold it: with all that befell the run that it resumes.

    Of another run it keeps only what its guard and its probes measured. Whoever follows it begins a run of his own.
    """
    experience, job = chosen.experience, chosen.job
    if not resumes(job):
        experience = Experience(learned=experience.learned, probes=experience.probes)
    arguments = {name: value for name, value in job.arguments.items() if name != RESUME}
    return replace(chosen, job=replace(job, arguments=arguments), experience=experience)


def _named(checkpoint: Path) -> Checkpoint:
    why = why_no_start(checkpoint)
    if why:
        raise OutputFolderError(
            f"Cannot resume from {checkpoint}: {why}.",
            hint="--resume_from_checkpoint without a folder takes the newest whole checkpoint of --output_dir.",
        )
    return Checkpoint(path=checkpoint, step=step_of(checkpoint))


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
