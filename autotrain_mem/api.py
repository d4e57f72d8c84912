"""The story on one page: what a configuration needs, which one fits, and the run itself.

``estimate`` rehearses one configuration; ``plan`` searches for the best that fits; ``fit`` plans and trains. A
:class:`Rehearsals` holds what the three share: the job, the device, and the worker that rehearses.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotrain_mem.engine.output_dir import (
    check_output,
    check_weights,
    default_dir,
    how_to_resume,
    move_aside,
    output_dir,
    resumes,
    write_run,
)
from autotrain_mem.engine.predict.compare_gpus import compare_cards
from autotrain_mem.engine.predict.plan import make_plan, plan_as_given, searched
from autotrain_mem.engine.predict.predictions import judge_trace
from autotrain_mem.engine.predict.preflight import check_preflight, check_room, examine
from autotrain_mem.engine.predict.sweep import check_size, combinations, estimate_all
from autotrain_mem.engine.probe.confirm import confirmed, is_probed
from autotrain_mem.engine.probe.real_probe import RealWays
from autotrain_mem.engine.recover.supervised import SupervisedRun, as_begun
from autotrain_mem.engine.rehearsals import OnCounting, Rehearsals, example_dataset, reads_dataset
from autotrain_mem.engine.request import PlanHints, Wish, rehearsals_for, resumed, with_plan
from autotrain_mem.engine.reuse.follow_plan import check_subject, follow_plan
from autotrain_mem.errors import AutofitError, InterruptedByUser, UsageError
from autotrain_mem.estimator.snapshot import make_snapshot
from autotrain_mem.machine.catalog import catalog
from autotrain_mem.machine.choose import choose, several, training_device
from autotrain_mem.machine.fault_injection import check_mishaps
from autotrain_mem.methods.table import REWARD_MODEL_ARGUMENTS
from autotrain_mem.planner.ladder import check_forbid
from autotrain_mem.report.snapshot import write_snapshot
from autotrain_mem.spec import Candidate, Estimate, Hardware, Plan, Report, codec
from autotrain_mem.spec.experience import Experience
from autotrain_mem.spec.gpu_comparison import Cards
from autotrain_mem.spec.hardware import ASSUMED_CAPABILITY
from autotrain_mem.spec.plan import as_recorded
from autotrain_mem.spec.sweep import Axis, Sweep, SweepPoint
from autotrain_mem.training import launch
from autotrain_mem.training.environment import environment_setting, process_environment
from autotrain_mem.training.supervisor import RESTARTS
from autotrain_mem.worker.client import Worker
from autotrain_mem.worker.pool import Workers

__all__ = [
    "RESTARTS",
    "PlanHints",
    "Rehearsals",
    "Wish",
    "Worker",
    "Workers",
    "begin",
    "cards",
    "check_size",
    "choose",
    "combinations",
    "default_dir",
    "estimate",
    "example_dataset",
    "fit",
    "gpus",
    "output_dir",
    "plan",
    "plan_as_given",
    "reads_dataset",
    "rehearsals_for",
    "resumed",
    "several",
    "sweep",
    "train",
    "training_environment",
    "with_plan",
]

OnAttempt = Callable[[Candidate], None]
OnEvent = Callable[[Mapping[str, Any]], None]


# -- what every face does --------------------------------------------------------------------------------------------


def begin(workers: Workers, wish: Wish, warn: Callable[[str], None], *, to_train: bool) -> Rehearsals:
    """The job that is wished for on its device; what would keep it from training is refused now, not after minutes.

    Args:
        warn: Hears when the cache on disk was damaged or cannot be written.

    Raises:
        UsageError: an argument that TRL does not know or refuses; what the method needs beside these is not given, such
            as a reward; a run cannot be resumed and be moved aside; the mishaps of a simulated card cannot be read.
        NoGpuError, UnknownGpuError, ModelNotFoundError, OutputFolderError.
    """
    rehearsals = rehearsals_for(workers, wish, warn)
    if to_train:
        _check_can_train(rehearsals, simulate=wish.simulate, overwrite=wish.overwrite_output_dir)
    return rehearsals


def train(rehearsals: Rehearsals, chosen: Plan, wish: Wish, on_event: OnEvent = lambda event: None) -> Report:
    """Confirm a plan by a probe, unless the wish is otherwise, and train with it. Raises as both do.

    Args:
        on_event: Is called with the events of :func:`fit`, with ``probing``, ``probe``, ``replanned`` and ``room``
            ones of the probes, and ``moved_aside`` with the ``path`` of another run.
    """
    if wish.overwrite_output_dir and (path := move_aside(rehearsals.job)):
        on_event({"event": "moved_aside", "path": str(path)})
    if wish.probe:
        chosen = _confirmed(rehearsals, chosen, wish, on_event)
    return fit(
        rehearsals,
        chosen,
        simulate=wish.simulate,
        guarded=wish.autofit.guard,
        max_restarts=wish.max_restarts,
        on_event=on_event,
    )


# -- the verbs -------------------------------------------------------------------------------------------------------


def estimate(rehearsals: Rehearsals, snapshot: pathlib.Path | None = None, *, checks: bool = True) -> Estimate:
    """One configuration exactly as given, TRL's defaults for the rest; no search.

    Args:
        snapshot: A file for the predicted history, as ``torch.cuda.memory._dump_snapshot`` would write it.
        checks: Look at model and tokenizer first, which takes half a second.

    Raises:
        ModelError, RehearsalError, BatchSplitError, ContextLengthError.
        OutputFolderError: the snapshot cannot be written.
    """
    job, room = rehearsals.job, rehearsals.room
    if snapshot is not None and not room.caches:
        raise UsageError(
            "--snapshot shows the allocator of a GPU, and the CPU has none.",
            hint="Name a card, such as --gpu a100-80gb, or remove --snapshot.",
        )
    if checks:
        check_preflight(rehearsals, reads_data=False)
    lengths = rehearsals.lengths_to_estimate()
    facts = rehearsals.describe()
    space = rehearsals.space(facts, lengths)
    limit = lengths.longest or (None if job.is_online else facts.context_length)
    trace = rehearsals.rehearse(space.base, replace(lengths, longest=limit))
    estimated = judge_trace(rehearsals, space.base, trace, lengths)
    if snapshot is not None:
        expandable = estimated.knobs.expandable_segments
        setting = environment_setting(job.environment, expandable_segments=space.base.expandable_segments)
        write_snapshot(snapshot, make_snapshot(trace, room, expandable_segments=expandable, setting=setting))
    return estimated


def sweep(
    workers: Workers,
    axes: Sequence[Axis],
    asked: Sequence[Rehearsals | AutofitError],
    on_point: Callable[[SweepPoint], None] = lambda point: None,
) -> Sweep:
    """Every combination of the axes' settings, each exactly as given; one that is refused does not end the others.

    Args:
        asked: The job of every combination, in the order of ``combinations``, or why there is none.
        on_point: Hears of every point as it is done, from whichever thread waited for it.

    Raises:
        AutofitError: every point was refused; the error is the first one's.
    """

    def estimated(one: Rehearsals, worker: Worker) -> Estimate:
        return estimate(one.with_worker(worker), checks=False)

    return estimate_all(axes, asked, estimated, workers.map, on_point)


def plan(
    rehearsals: Rehearsals,
    on_attempt: OnAttempt = lambda attempt: None,
    on_counting: OnCounting = lambda counting: None,
    *,
    to_train: bool = False,
    simulate: bool = False,
    earlier: Plan | None = None,
    again: str = "plan(...).save(path)",
) -> Plan:
    """The best configuration that fits the budget: the fastest of the first level of harm that holds one.

    With ``earlier``, a plan that was made before, nothing is searched. It is taken as it is where model, card, versions
    and all words that a rehearsal depends on are the same; else its settings are rehearsed once, and a warning of the
    plan that comes back says why.

    Args:
        on_attempt: Is called with every configuration as it has been rehearsed.
        on_counting: Is called with how far the counting of tokens is.
        to_train: The data will be needed, so they are read even where the plan could do without.
        simulate: The training will run on the CPU, under a simulated card.
        again: How to make the earlier plan again, for the hints of errors.

    Raises:
        DoesNotFitError: nothing that the user allows fits, and the message holds the nearest that would; or the earlier
            plan's settings take more than there is here.
        UsageError: the earlier plan is for another model or method, or its settings contradict the job.
        ModelError, DatasetError, RehearsalError, BatchSplitError, ContextLengthError.
    """
    started = time.perf_counter()
    job = rehearsals.job
    check_forbid(job.forbid)
    facts = rehearsals.describe()
    if earlier is not None:
        check_subject(earlier, job, facts, again)
    checked, lengths = examine(rehearsals, on_counting, to_train=to_train, simulate=simulate)
    if earlier is not None:
        chosen = follow_plan(rehearsals, earlier, facts, lengths, on_attempt, again=again)
    else:
        best = searched(rehearsals, facts, lengths, on_attempt)
        chosen = make_plan(rehearsals, best, facts, lengths, seconds=time.perf_counter() - started)
    warnings = check_room(checked, chosen.knobs, chosen.optimizer_steps)
    return replace(chosen, warnings=(*map(str, warnings), *chosen.warnings))


def cards(
    rehearsals: Rehearsals,
    devices: Sequence[Hardware],
    on_attempt: Callable[[Hardware, Candidate], None] = lambda card, attempt: None,
    on_counting: OnCounting = lambda counting: None,
) -> Cards:
    """The best plan for each of many cards; none of them needs to be here.

    Raises:
        ModelError, DatasetError, RehearsalError, BatchSplitError, ContextLengthError.
    """
    check_forbid(rehearsals.job.forbid)
    newest = max(devices, key=lambda card: card.compute_capability or ASSUMED_CAPABILITY)  # which can most
    _, lengths = examine(replace(rehearsals, hardware=newest), on_counting)
    return compare_cards(rehearsals, devices, lengths, on_attempt)


def _confirmed(rehearsals: Rehearsals, chosen: Plan, wish: Wish, on_event: OnEvent) -> Plan:
    """Try a plan before it trains: two real steps on the longest rows, in a process that then ends.

    Where they need more than predicted, or far less, a plan that was searched for moves; one that the user follows does
    not. Its ``experience`` holds every probe. Nothing is probed where nothing measures (``engine.probe.confirm:
    is_probed``), nor a plan that was confirmed before, nor one that a run goes on with and that nothing has changed
    since.

    Raises:
        DoesNotFitError: nothing that is allowed fits, by what was measured.
        OutputFolderError, TrainingError, RewardFunctionError, DatasetError, ModelError, InterruptedByUser.
    """
    job = rehearsals.job
    device = training_device(rehearsals.hardware, simulate=wish.simulate)
    goes_on = resumes(job) and chosen.experience != Experience()
    if goes_on or not is_probed(job, device, vllm_share_bytes=rehearsals.vllm_share_bytes):
        return chosen
    folder = launch.prepare_folder(output_dir(job), resuming=resumes(job))
    ways = RealWays(rehearsals=rehearsals, device=device, simulate=wish.simulate, folder=folder, workers=Workers)
    return confirmed(chosen, ways, on_event, may_move=wish.plan is None)


def fit(
    rehearsals: Rehearsals,
    chosen: Plan,
    *,
    simulate: bool,
    guarded: bool = True,
    max_restarts: int = RESTARTS,
    on_event: OnEvent = lambda event: None,
) -> Report:
    """Train with a plan in a process of its own, and in others where it dies; returns predicted against measured.

    The output folder then holds the model, ``plan.json``, ``run.json`` and ``train.log``.

    Args:
        simulate: Train on the CPU while a simulated card of that name keeps account.
        guarded: Else the process trains as TRL does by itself, and ends when the device is full.
        max_restarts: How often in a row another process may go on, without a new checkpoint in between.
        on_event: Hears of every step: ``start``, ``step`` and ``log`` events of
            ``training.process.progress_callback``, ``checkpoint`` and ``save_failed`` ones of
            ``training.process.checkpointing``, ``restart`` of ``training.supervisor``.

    Raises:
        OutputFolderError: the folder cannot be written or holds another run.
        GpuOutOfMemoryError, TrainingError, DatasetError, ModelError.
        InterruptedByUser: Ctrl-C; what was written is whole.
    """
    job = rehearsals.job
    device = training_device(rehearsals.hardware, simulate=simulate)
    folder = launch.prepare_folder(output_dir(job), resuming=resumes(job))
    chosen = as_begun(chosen)
    write_run(folder, plan_json=codec.to_json(chosen))
    run = SupervisedRun(
        rehearsals=rehearsals,
        plan=chosen,
        device=device,
        folder=folder,
        simulate=simulate,
        guarded=guarded,
        on_event=on_event,
    )
    report = run.finish(restarts=max_restarts)
    experience = codec.to_json(run.plan.experience)
    run_json = codec.to_json(report) | {"job": codec.to_json(as_recorded(job)), "experience": experience}
    write_run(folder, report_json=run_json)
    if run.interrupted:
        raise InterruptedByUser(
            f"Interrupted after step {report.steps}; what was written is whole.", hint=how_to_resume(folder)
        )
    return report


def _check_can_train(rehearsals: Rehearsals, *, simulate: bool, overwrite: bool) -> None:
    """Fail before minutes of planning, not after: is there a device, are there weights, and a folder to write to?"""
    job = rehearsals.job
    training_device(rehearsals.hardware, simulate=simulate)
    if simulate:
        check_mishaps(job.environment)
    rehearsals.workers.first.check_can_train(job)
    for name in filter(None, (job.model, *map(job.arguments.get, REWARD_MODEL_ARGUMENTS))):
        check_weights(pathlib.Path(name))
    check_output(job, overwrite=overwrite)


def training_environment(rehearsals: Rehearsals, chosen: Plan, *, simulate: bool) -> dict[str, str]:
    """Returns what is set for the training process; a card that is not here counts as the first of a machine."""
    device = rehearsals.hardware
    if device.origin in ("named", "imagined"):
        device = replace(device, uuid="0")
    return process_environment(device, chosen.knobs, rehearsals.job.environment, simulate=simulate)


def gpus() -> tuple[Hardware, ...]:
    """The cards that are known by name."""
    return catalog()
