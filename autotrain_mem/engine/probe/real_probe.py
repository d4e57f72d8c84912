"""The real ways in which a plan is confirmed: what NVML says, a process that probes, workers that rehearse again."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from autotrain_mem.engine.predict.plan import make_plan, searched
from autotrain_mem.engine.predict.predictions import Predictions
from autotrain_mem.engine.probe.calibration import Correction
from autotrain_mem.engine.probe.confirm import Replanned
from autotrain_mem.engine.rehearsals import Rehearsals
from autotrain_mem.machine.detect import detect
from autotrain_mem.machine.other_processes import others_on
from autotrain_mem.spec import Candidate, Footprint, Hardware, Plan, Probe
from autotrain_mem.spec.length import without_wish
from autotrain_mem.training.environment import process_environment
from autotrain_mem.training.launch_probe import run_probe
from autotrain_mem.training.request import Request
from autotrain_mem.worker.pool import Workers


@dataclass(frozen=True, kw_only=True, slots=True)
class RealWays:
    """For one job on one device.

    Its workers may have ended: others are started if the plan has to move, and end before the next probe.
    """

    rehearsals: Rehearsals
    device: Hardware
    """That the training runs on: the planned one, or one that is here and holds a plan for it."""
    simulate: bool
    folder: pathlib.Path
    """The run's output folder, which exists."""
    workers: Callable[[], Workers]
    on_attempt: Callable[[Candidate], None] = lambda attempt: None
    footprints: dict[Any, Footprint] = field(default_factory=dict)
    """What was rehearsed for one move serves the next."""

    def look(self) -> Hardware:
        """Only a card that is here has others on it."""
        planned_for = self.rehearsals.hardware
        if self.simulate or planned_for.origin != "detected":
            return planned_for
        return replace(planned_for, free_bytes=self._now(planned_for).free_bytes)

    def budget_bytes(self, hardware: Hardware) -> int:
        """Returns the budget with the user's headroom."""
        return replace(self.rehearsals, hardware=hardware).budget_bytes

    def probe(self, plan: Plan) -> Probe:
        """In a process of its own; this one never opens a CUDA context."""
        job = self.rehearsals.job
        device = self.device if self.simulate else self._now(self.device)
        others = () if self.simulate else others_on(device)
        request = Request(
            task="probe",
            job=replace(job, arguments=without_wish(job.arguments)),
            knobs=plan.knobs,
            hardware=device,
            simulate=self.simulate,
            output_dir=str(self.folder),
        )
        environment = process_environment(device, plan.knobs, job.environment, simulate=self.simulate)
        return replace(run_probe(request, environment, self.folder), others=others)

    def planned(self, correction: Correction, hardware: Hardware) -> Replanned:
        """The search of ``api.plan`` once more; what was rehearsed for it is mostly kept."""
        with self.workers() as workers:
            return self._search(replace(self.rehearsals, workers=workers, hardware=hardware), correction)

    def _search(self, plain: Rehearsals, correction: Correction) -> Replanned:
        started = time.perf_counter()
        rehearsals = replace(plain, correction=correction)
        facts, lengths = rehearsals.describe(), rehearsals.lengths()
        best = searched(rehearsals, facts, lengths, self.on_attempt, self.footprints)
        (predicted,) = Predictions(plain, facts, lengths, self.footprints).rehearse([best.estimate.knobs], whole=True)
        seconds = time.perf_counter() - started
        plan = make_plan(rehearsals, best, facts, lengths, seconds=seconds)
        return Replanned(plan=plan, predicted=predicted)

    def _now(self, card: Hardware) -> Hardware:
        """The same card with what is free of it now; as it was where it has gone."""
        free = {each.uuid: each.free_bytes for each in detect()}
        return replace(card, free_bytes=free.get(card.uuid, card.free_bytes))
