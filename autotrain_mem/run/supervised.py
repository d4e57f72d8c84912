"""Runs a supervised training: starts its processes, and keeps ``plan.json`` up to date."""

import contextlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotrain_mem.planning.output_dir import RESUME, how_to_resume, output_dir, resumes, resumes_in_folder
from autotrain_mem.planning.rehearsals import Rehearsals
from autotrain_mem.report.shortage_view import explained
from autotrain_mem.run.replan import flags_of, on_machines, smallest_change, with_less_on_device, with_less_on_host
from autotrain_mem.run.run_figures import EventLog, RunFigures
from autotrain_mem.settings.words import without_maximized
from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError, GpuOutOfMemoryError, InterruptedByUser, OutputFolderError
from autotrain_mem.support.files import write_json
from autotrain_mem.support.versions import versions_key
from autotrain_mem.training import launch
from autotrain_mem.training.checkpoint_kinds import Resumer, check_form
from autotrain_mem.training.checkpoints import Checkpoint, discard, newest_start, step_of, why_no_start, why_torn
from autotrain_mem.training.environment import one_tracked_run, process_environment
from autotrain_mem.training.exit_causes import Cause, Ending, Remedy, cause_of
from autotrain_mem.training.machines.lead import Machines
from autotrain_mem.training.rank_processes import Event
from autotrain_mem.training.run_folder import LastRun, RunFolder, hold_folder
from autotrain_mem.training.supervisor import Change, RunAttempt, supervise
from autotrain_mem.training.task import Request
from autotrain_mem.types import PLAN_NAME, RUN_NAME, Hardware, Incident, Job, Knobs, Plan, Report
from autotrain_mem.types.experience import Experience, LearnedLimits, Restart
from autotrain_mem.types.planned import as_recorded
from autotrain_mem.worker.pool import Workers


def hold_output(
    job: Job, on_event: Callable[[Mapping[str, Any]], None], *, overwrite: bool = False
) -> contextlib.AbstractContextManager[RunFolder]:
    """Locks a job's output folder until the run has ended."""
    return hold_folder(output_dir(job), resuming=resumes_in_folder(job), overwrite=overwrite, on_event=on_event)


@dataclass(kw_only=True)
class SupervisedRun:
    """Represents one run in one folder. If a process dies, another one resumes (``training.supervisor``)."""

    rehearsals: Rehearsals
    plan: Plan
    """The content of ``plan.json``: the current settings and the run's experience."""
    device: Hardware
    output: RunFolder
    simulate: bool
    guarded: bool
    """Whether a guard is attached."""
    on_event: Callable[[Mapping[str, Any]], None]
    machines: Machines | None = None
    """The other machines of the run; None for a single machine."""
    _first: Checkpoint | None = None
    _tracked: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The id of the Weights & Biases run that all processes share."""
    _number: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The run's id. Its checkpoints contain it, so that no other run resumes from them."""
    _notes: set[str] = field(default_factory=set)
    """The notes so far, since each is reported once."""
    _figures: RunFigures = field(default_factory=RunFigures)
    _log: EventLog = field(init=False)

    def __post_init__(self) -> None:
        self._log = EventLog(self.folder)

    @property
    def folder(self) -> Path:
        return self.output.path

    def finish(self, *, restarts: int) -> Report:
        """Trains to the end; writes ``plan.json`` before the training and ``run.json`` after it. ``restarts``: the most
        restarts in a row without a new checkpoint.

        Raises:
            OutputFolderError: the checkpoint to resume from is unusable, or a file cannot be written.
            InterruptedByUser: Ctrl-C.
            GpuOutOfMemoryError, TrainingError and other errors of ``supervise``.
        """
        checkpoint, start = self.first_checkpoint(), None
        if checkpoint is not None:
            start = checkpoint.path
            check_form(start, Resumer.of(self.plan.knobs))
        command = () if self.machines is None else self.machines.command
        self.output.begin(LastRun(number=self._number, start=start, command=command))
        self.plan = as_begun(self.plan)
        write_json(self.folder / PLAN_NAME, codec.to_json(self.plan))
        first = RunAttempt(knobs=self.plan.knobs, learned=self.plan.experience.learned, checkpoint=checkpoint)
        try:
            end = supervise(first, self, restarts=restarts, on_event=self.record)
        except BaseException as error:
            why = f"{error.message.partition(chr(10))[0]} {error.hint}" if isinstance(error, AutofitError) else ""
            ending = "interrupted" if isinstance(error, InterruptedByUser | KeyboardInterrupt) else "failed"
            self._log.end(ending, why=" ".join(why.split()))
            raise
        self._log.end("interrupted" if end["interrupted"] else "finished", end["steps"])
        report = self._figures.report(end, self.plan, str(self.folder))
        if report.has_trained or not (self.folder / RUN_NAME).exists():  # else the report of the run that trained stays
            job, experience = as_recorded(self.rehearsals.job), self.plan.experience
            more = {"versions": versions_key(), "job": codec.to_json(job), "experience": codec.to_json(experience)}
            self._write(RUN_NAME, codec.to_json(report) | more)
        if self._notes:  # the disk may have room by now
            self._keep(self.plan)
        if end["interrupted"]:
            message = f"Interrupted after step {report.steps}; all files are complete."
            raise InterruptedByUser(message, hint=how_to_resume(self.folder))
        self.output.end()
        return report

    def train(self, attempt: RunAttempt, on_event: Callable[[Event], None]) -> Event | Ending:
        job, checkpoint = self.rehearsals.job, attempt.checkpoint
        resume_from = None if checkpoint is None else str(checkpoint.path)
        arguments: dict[str, Any] = {**without_maximized(job.arguments), RESUME: resume_from}
        request = Request(
            task="train",
            job=replace(job, arguments=arguments),
            knobs=attempt.knobs,
            hardware=self.device,
            simulate=self.simulate,
            output_dir=str(self.folder),
            run=self._number,
            folder=self.output.identity,
            learned=attempt.learned,
            predicted=self.plan.estimate.memory.phases,
            predicted_reserved_bytes=self.plan.estimate.reserved_bytes,
            budget_bytes=self.plan.estimate.reservable_bytes,
            guarded=self.guarded,
        )
        environment = process_environment(self.device, attempt.knobs, job.environment, simulate=self.simulate)
        environment |= one_tracked_run(self._tracked, job.environment)
        log, lock = self.folder / launch.LOG_NAME, self.output.lock
        return launch.train(request, environment, log, on_event, lock=lock, machines=self.machines)

    def newest(self, ending: Ending) -> Checkpoint | None:
        if ending.saving and why_torn(Path(ending.saving)):
            discard(Path(ending.saving))
        newest = self._newest_start(self._number)
        if newest is None and self._first is not None and not why_no_start(self._first.path):
            return self._first
        return newest

    def changed(self, cause: Cause, ending: Ending, knobs: Knobs) -> Change | None:
        if cause.remedy is Remedy.MACHINES:
            assert self.machines is not None
            device = self.machines.gather(self.device)  # waits for the lost machine
            if device.topology.processes == knobs.processes:
                return None
            with Workers() as workers:
                rehearsals = replace(self.rehearsals, workers=workers)
                self.rehearsals, other = on_machines(rehearsals, self.plan, device.topology)
            self.device = device
            self._keep(other)
            names = ("per_device_train_batch_size", "gradient_accumulation_steps")
            division = " ".join(f"--{name} {getattr(other.knobs, name)}" for name in names)
            return Change(knobs=other.knobs, flags=f"--nodes {device.topology.nodes} {division}")
        with Workers() as workers:
            rehearsals = replace(self.rehearsals, workers=workers)
            try:
                if cause.remedy is Remedy.LESS_HOST_MEMORY:
                    plan = with_less_on_host(rehearsals, self.plan)
                else:
                    others_bytes = 0 if ending.shortage is None else ending.shortage.others_bytes
                    plan = with_less_on_device(rehearsals, self.plan, ending.peak_reserved_bytes, others_bytes)
            except (AutofitError, OSError):
                return None  # the user gets the training's error, not the search's
        if plan is None:
            return None
        self._keep(plan)
        return Change(knobs=plan.knobs, flags=flags_of(knobs, plan.knobs))

    def explained(self, ending: Ending) -> AutofitError:
        error = ending.error
        if cause_of(ending).remedy is Remedy.LESS_HOST_MEMORY:
            cure = "Use less host memory: --dataloader_num_workers 0, and no offloading."
            error.hint = f"{error.hint}\n{cure}".strip()
        shortage = ending.shortage
        if not isinstance(error, GpuOutOfMemoryError) or shortage is None:
            return error
        with Workers() as workers:
            nearest = smallest_change(replace(self.rehearsals, workers=workers), self.plan.estimate, shortage)
        error = explained(shortage, self.plan, nearest)
        if ending.rank is not None:
            error.message = f"Rank {ending.rank}: {error.message}"
        return error

    def record(self, event: Event) -> None:
        experience = self.plan.experience
        match event["event"]:
            case "incident":
                experience = experience.with_incident(codec.from_json(Incident, event["incident"]))
                experience = experience.with_learned(codec.from_json(LearnedLimits, event["learned"]))
            case "restart":
                experience = experience.with_restart(codec.from_json(Restart, event["restart"]))
            case "checkpoint" if not (self.folder / PLAN_NAME).exists():
                self._keep(self.plan)
                gone = f"{self.folder} was removed or moved during the run: {PLAN_NAME} is written again."
                self.record({"event": "note", "message": f"{gone} Earlier checkpoints are not in it."})
            case "note" if event["message"] in self._notes:
                return
            case "note":
                self._notes.add(event["message"])
        self._figures.see(event)
        self._log.see(event)
        if experience is not self.plan.experience:
            self._keep(replace(self.plan, experience=experience))
        self.on_event(event)

    def _keep(self, plan: Plan) -> None:
        self.plan = plan
        self._write(PLAN_NAME, codec.to_json(plan))

    def _write(self, name: str, content: dict[str, Any]) -> None:
        """Writes a file of the run. A full disk does not end the training; it is reported once."""
        try:
            write_json(self.folder / name, content)
        except OutputFolderError as error:
            self.record({"event": "note", "message": f"{error.message} The run continues without it."})

    def first_checkpoint(self) -> Checkpoint | None:
        """Returns the checkpoint to resume from: the user's, or the newest whole one of the folder's last run."""
        if not (request := self.rehearsals.job.arguments.get(RESUME)):
            return None
        if request is True:
            self._first = self._last_start()
        elif why := why_no_start(Path(str(request))):
            raise OutputFolderError(
                f"Cannot resume from {request}: {why}.",
                hint="--resume_from_checkpoint without a folder takes the newest complete checkpoint of --output_dir.",
            )
        else:
            self._first = Checkpoint(path=Path(str(request)), step=step_of(Path(str(request))))
        return self._first

    def _last_start(self) -> Checkpoint:
        """Continues the folder's last run, and returns its newest checkpoint. If TRL alone trained there, a checkpoint
        of any run counts."""
        if (last := self.output.last_run()) is not None:
            self._number = last.number
        if (newest := self._newest_start(None if last is None else last.number)) is not None:
            return newest
        if last is not None and last.start is not None and not why_no_start(last.start):
            return Checkpoint(path=last.start, step=step_of(last.start))
        hint = "To start again, remove --resume_from_checkpoint and give another --output_dir."
        if (other := self._newest_start()) is not None:
            hint += f"\nTo resume from another run: --resume_from_checkpoint {other.path}"
        raise OutputFolderError(
            f"The output folder {self.folder} holds no complete checkpoint of its last run to resume from.", hint=hint
        )

    def _newest_start(self, run: str | None = None) -> Checkpoint | None:
        return newest_start(self.folder, run, lambda message: self.on_event({"event": "torn", "message": message}))


def as_begun(chosen: Plan) -> Plan:
    """Returns the plan to write into the output folder. A new run keeps only what the guard and probes measured."""
    experience, job = chosen.experience, chosen.job
    if not resumes(job):
        experience = Experience(learned=experience.learned, probes=experience.probes)
    arguments = {name: value for name, value in job.arguments.items() if name != RESUME}
    return replace(chosen, job=replace(job, arguments=arguments), experience=experience)
