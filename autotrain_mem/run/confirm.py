"""Probes a plan before it trains, and replaces it if the measurements contradict its prediction."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotrain_mem.machine.choose import training_device
from autotrain_mem.machine.detect import as_now
from autotrain_mem.machine.nvml import STEADY_BYTES, others_on
from autotrain_mem.planning.calibration import Correction, Point, corrected
from autotrain_mem.planning.output_dir import resumes
from autotrain_mem.planning.plan import make_plan, searched_with_images
from autotrain_mem.planning.predictions import Predictions
from autotrain_mem.planning.rehearsals import Rehearsals
from autotrain_mem.planning.run_request import RunRequest
from autotrain_mem.report.run_history import outcome
from autotrain_mem.settings.words import without_maximized
from autotrain_mem.support import codec
from autotrain_mem.support.errors import DoesNotFitError
from autotrain_mem.support.units import format_bytes
from autotrain_mem.training.environment import process_environment
from autotrain_mem.training.launch import run_probe
from autotrain_mem.training.machines.lead import Machines
from autotrain_mem.training.run_folder import OnEvent
from autotrain_mem.training.task import Request
from autotrain_mem.types import Estimate, Experience, Footprint, Hardware, Job, Plan, Probe
from autotrain_mem.worker.pool import Workers

MOST_PROBES = 3
"""The most probes of a plan. Our choice: a probe takes about as long as the start of a run."""
ROOM_WORTH_A_MOVE = 0.10
"""A faster plan is searched for if the first probe's need is below the prediction by more than this share of it. Most
public runs were predicted within 5 % (docs/understand/accuracy.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replanned:
    """Holds the best plan under a correction, and the uncorrected estimate of its settings."""

    plan: Plan
    predicted: Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeBackend:
    """Runs probes and searches for one job on one device. The workers of a search end before the next probe."""

    rehearsals: Rehearsals
    device: Hardware
    """The local device that trains, which may stand in for the planned one."""
    simulate: bool
    folder: Path
    """The run's output folder, which exists."""
    workers: Callable[[], Workers]
    machines: Machines | None = None
    """The other machines of the run."""
    footprints: dict[Any, Footprint] = field(default_factory=dict)
    """Rehearsals of earlier searches."""

    def look(self) -> Hardware:
        """Returns the planned device with its current free memory, if that can be measured."""
        return self.rehearsals.hardware if self.simulate else as_now(self.rehearsals.hardware)

    def budget_bytes(self, hardware: Hardware) -> int:
        return replace(self.rehearsals, hardware=hardware).budget_bytes

    def probe(self, plan: Plan) -> Probe:
        """Tries the plan's settings in a process of its own. The result is marked as fitting if no allocation failed
        and no cache was released; its bytes are not compared with a budget."""
        job, device = self.rehearsals.job, self.device
        others = () if self.simulate else others_on(device)
        request = Request(
            task="probe",
            job=replace(job, arguments=without_maximized(job.arguments)),
            knobs=plan.knobs,
            hardware=device,
            simulate=self.simulate,
            output_dir=str(self.folder),
        )
        environment = process_environment(device, plan.knobs, job.environment, simulate=self.simulate)
        uuids = () if self.simulate else device.topology.uuids or (device.uuid,)
        cards = [as_now(replace(device, uuid=uuid)) for uuid in uuids]
        probe = replace(run_probe(request, environment, self.folder, self.machines), others=others)
        # In a container the figure is the drop in free memory (``probe: _non_torch_bytes``), to which others may add.
        is_steady = all(abs(as_now(card).free_bytes - card.free_bytes) <= STEADY_BYTES for card in cards)
        return probe if is_steady else replace(probe, non_torch_bytes=None)

    def planned(self, correction: Correction, hardware: Hardware) -> Replanned:
        """Searches again with a correction. Raises DoesNotFitError if no allowed plan fits."""
        with self.workers() as workers:
            started, plain = time.perf_counter(), replace(self.rehearsals, workers=workers, hardware=hardware)
            asked = replace(plain, correction=correction).subject()
            subject, found = searched_with_images(asked, lambda attempt: None, self.footprints)
            uncorrected = replace(subject, correction=plain.correction)
            (predicted,) = Predictions(uncorrected, self.footprints).rehearse([found.estimate.knobs], whole=True)
            plan = make_plan(subject, found, seconds=time.perf_counter() - started)
            return Replanned(plan=plan, predicted=predicted)


def probed(
    rehearsals: Rehearsals,
    chosen: Plan,
    request: RunRequest,
    folder: Path,
    on_event: OnEvent,
    machines: Machines | None,
) -> Plan:
    """Returns the plan to train with (:func:`confirmed`). A run that resumes with its plan is not probed again.
    ``folder``: the run's output folder, which exists.

    Raises:
        DoesNotFitError: by the measurements, no allowed plan fits.
        OutputFolderError, TrainingError, RewardFunctionError, DatasetError, ModelError: a probe fails as a run would.
        InterruptedByUser: Ctrl-C.
    """
    job = rehearsals.job
    device = training_device(rehearsals.hardware, simulate=request.simulate, environment=job.environment)
    is_resumed = resumes(job) and chosen.experience != Experience()
    if is_resumed or not is_probed(job, device, vllm_share_bytes=rehearsals.vllm_share_bytes):
        return chosen
    backend = ProbeBackend(
        rehearsals=rehearsals,
        device=device,
        simulate=request.simulate,
        folder=folder,
        workers=Workers,
        machines=machines,
    )
    return confirmed(chosen, backend, on_event, may_move=request.plan is None)


def is_probed(job: Job, hardware: Hardware, *, vllm_share_bytes: int) -> bool:
    """Returns whether a probe can measure the trainer's memory. It cannot on a CPU, with a vLLM engine in the trainer's
    process, or for a drop-in trainer, which already holds its GPU; a stream has no known longest rows."""
    return hardware.origin != "cpu" and not vllm_share_bytes and job.python_call is None and not job.streams


def confirmed(
    chosen: Plan, backend: ProbeBackend, on_event: OnEvent = lambda event: None, *, may_move: bool = True
) -> Plan:
    """Returns a plan that fitted in a probe; its experience contains every probe.

    If a probe does not fit, the search is repeated with a corrected prediction, for at most three probes. If the first
    probe needs far less than predicted, a faster plan is probed once. A plan that was probed before, and fits into the
    memory that is free now, is not probed again. ``on_event``: gets ``probing``, ``probe``, ``replanned`` and ``room``
    events. ``may_move``: false if the user chose the settings: then a probe that does not fit is an error.
    Raises DoesNotFitError if no allowed plan fits by the measurements.
    """
    return _Confirmation(chosen, chosen.estimate, backend, on_event, may_move, chosen.experience).confirmed()


@dataclass(slots=True)
class _Confirmation:
    plan: Plan
    predicted: Estimate
    """The uncorrected estimate of the plan's settings."""
    backend: ProbeBackend
    on_event: OnEvent
    may_move: bool
    experience: Experience
    points: tuple[Point, ...] = ()
    fitting: Plan | None = None
    """The plan that fitted, while a faster one is probed."""
    non_torch_bytes: int | None = None

    def confirmed(self) -> Plan:
        chosen = self.plan
        self._look()
        known = [probe for probe in chosen.experience.probes if probe.fits and probe.knobs == self.plan.knobs]
        if known and (known[-1].required_bytes or 0) <= self.predicted.budget_bytes:
            return chosen
        while True:
            if self._probe().fits:
                if not (self.may_move and self._has_room() and self._moves_up()):
                    return replace(self._as_measured(), experience=self.experience)
            elif self.fitting is not None:
                return replace(self.fitting, experience=self.experience)
            elif len(self.points) == MOST_PROBES or not self.may_move:
                raise DoesNotFitError(
                    f"{self.plan.model} does not fit {self.predicted.hardware.name}: each probe needed more than the "
                    f"budget.\n{self._measured()}",
                    hint="--headroom SIZE  with a smaller SIZE than now, the budget is larger\n"
                    "--no_probe       trains without a probe\nWithout --plan or fixed values a plan may need less.",
                )
            else:
                self._move()
            self._look()

    def _look(self) -> None:
        """Updates the budget if the GPU's free memory has changed since the plan was made."""
        planned_for, device = self.predicted.hardware, self.backend.look()
        if abs(device.free_bytes - planned_for.free_bytes) <= STEADY_BYTES:
            return
        self.on_event({"event": "room", "before_bytes": planned_for.free_bytes, "now_bytes": device.free_bytes})
        here = replace(planned_for, free_bytes=device.free_bytes)
        budget_bytes = self.backend.budget_bytes(here)
        self.predicted = replace(self.predicted, hardware=here, budget_bytes=budget_bytes)
        estimate = replace(self.plan.estimate, hardware=here, budget_bytes=budget_bytes)
        self.plan = replace(self.plan, estimate=estimate)
        if not self.plan.estimate.fits:
            if not self.may_move:
                raise DoesNotFitError(
                    f"{self.plan.model} needs {format_bytes(self.plan.estimate.required_bytes)} with the settings of "
                    f"its plan, but only {format_bytes(here.free_bytes)} of {here.name} are free now.",
                    hint="Stop the other processes on the GPU, or plan again without --plan.",
                )
            self._move()

    def _probe(self) -> Probe:
        self.on_event({"event": "probing", "knobs": codec.to_json(self.plan.knobs)})
        probe = self.backend.probe(self.plan)
        outside_bytes = self.predicted.outside_bytes if probe.non_torch_bytes is None else probe.non_torch_bytes
        held_bytes = 0 if probe.measured is None else probe.measured.peak_reserved_bytes + outside_bytes
        probe = replace(probe, fits=probe.fits and held_bytes <= self.predicted.budget_bytes)
        self.experience = replace(self.experience, probes=(*self.experience.probes, probe))
        self.points = (*self.points, Point(predicted=self.predicted, probe=probe))
        if probe.non_torch_bytes is not None:
            self.non_torch_bytes = probe.non_torch_bytes
        sizes = {"predicted_bytes": self.plan.estimate.required_bytes, "budget_bytes": self.predicted.budget_bytes}
        self.on_event({"event": "probe", "probe": codec.to_json(probe), **sizes})
        return probe

    def _as_measured(self) -> Plan:
        """Returns the plan. If any probe failed, the last probe alone corrects the plan's prediction."""
        if all(point.probe.fits for point in self.points):
            return self.plan
        correction = corrected(self.points[-1:], self.predicted.budget_bytes)
        memory = correction.of(self.predicted.memory, self.plan.knobs)
        memory = replace(memory, mixed_lengths=self.plan.estimate.memory.mixed_lengths)
        return replace(self.plan, estimate=replace(self.plan.estimate, memory=memory))

    def _has_room(self) -> bool:
        """Returns whether the first probe, on rows of the planned length, needed far less than predicted."""
        (point, *others), probe = self.points, self.points[-1].probe
        if others or probe.required_bytes is None or (probe.row_tokens or 0) < self.plan.row_tokens:
            return False
        return probe.required_bytes < (1 - ROOM_WORTH_A_MOVE) * point.predicted.required_bytes

    def _moves_up(self) -> bool:
        """Moves to the best plan under the measurements; returns False if that is the current one."""
        better = self._planned()
        if better.plan.knobs == self.plan.knobs:
            return False
        self.fitting = self.plan
        self._take(better)
        return True

    def _move(self) -> None:
        try:
            self._take(self._planned())
        except DoesNotFitError as error:
            if not self.points:
                raise
            raise DoesNotFitError(f"{error.message}\n{self._measured()}", hint=error.hint) from error

    def _planned(self) -> Replanned:
        correction = corrected(self.points, self.predicted.budget_bytes) if self.points else Correction()
        hardware = self.predicted.hardware
        if self.non_torch_bytes is not None:
            hardware = replace(hardware, non_torch_bytes=self.non_torch_bytes, communicator_bytes=0)
        return self.backend.planned(correction, hardware)

    def _take(self, replanned: Replanned) -> None:
        before = self.plan
        self.plan = replace(replanned.plan, warnings=before.warnings)
        self.predicted = replanned.predicted
        self.on_event({"event": "replanned", "before": codec.to_json(before.knobs), "plan": codec.to_json(self.plan)})

    def _measured(self) -> str:
        points = ((point.probe, point.predicted) for point in self.points)
        lines = (outcome(probe, predicted.required_bytes, predicted.budget_bytes) for probe, predicted in points)
        return "\n".join(f"  probed {line}" for line in lines)
