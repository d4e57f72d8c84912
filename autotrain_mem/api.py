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
    default_dir,
    how_to_go_on,
    move_aside,
    output_dir,
    own_plan,
    plan_of_own_run,
    resumes,
)
from autotrain_mem.engine.predict.compare_gpus import compare_cards
from autotrain_mem.engine.predict.method_alternatives import with_alternatives
from autotrain_mem.engine.predict.plan import make_plan, optimizer_steps, plan_as_given
from autotrain_mem.engine.predict.predictions import Predictions, judge_trace
from autotrain_mem.engine.predict.preflight import Checked, check_preflight, check_room
from autotrain_mem.engine.predict.sweep import check_size, combinations, estimate_all
from autotrain_mem.engine.probe.confirm import confirmed, is_probed
from autotrain_mem.engine.probe.real_probe import RealWays
from autotrain_mem.engine.record import write_run
from autotrain_mem.engine.recover.supervised import as_begun, train_supervised
from autotrain_mem.engine.rehearsals import Hear, Lengths, Rehearsals, example_dataset, reads_dataset
from autotrain_mem.engine.request import Words, kept_between_runs, rehearsals_for
from autotrain_mem.engine.reuse.follow_plan import check_subject, follow_plan
from autotrain_mem.errors import (
    AutofitError,
    DoesNotFitError,
    InterruptedByUser,
    ModelNotFoundError,
    UsageError,
)
from autotrain_mem.estimator.snapshot import make_snapshot
from autotrain_mem.machine.catalog import catalog
from autotrain_mem.machine.choose import choose, several, training_device
from autotrain_mem.machine.fault_injection import check_mishaps
from autotrain_mem.methods.table import REWARD_MODEL_ARGUMENTS
from autotrain_mem.planner.ladder import check_forbid
from autotrain_mem.planner.search import search
from autotrain_mem.report.snapshot import write_snapshot
from autotrain_mem.spec import Attempt, Estimate, Hardware, Job, Knobs, Plan, Report
from autotrain_mem.spec.experience import Experience
from autotrain_mem.spec.gpu_comparison import Cards
from autotrain_mem.spec.hardware import ASSUMED_CAPABILITY
from autotrain_mem.spec.length import MAX_LENGTH, is_wish
from autotrain_mem.spec.plan import as_recorded
from autotrain_mem.spec.sweep import Axis, Sweep, SweepPoint
from autotrain_mem.training import launch
from autotrain_mem.training.environment import environment_setting, process_environment
from autotrain_mem.training.supervisor import RESTARTS
from autotrain_mem.worker.client import Worker
from autotrain_mem.worker.pool import Workers

__all__ = [
    "RESTARTS",
    "Rehearsals",
    "Words",
    "Worker",
    "Workers",
    "cards",
    "check_can_train",
    "check_size",
    "choose",
    "combinations",
    "confirm",
    "default_dir",
    "estimate",
    "example_dataset",
    "fit",
    "follow",
    "gpus",
    "kept_between_runs",
    "move_aside",
    "output_dir",
    "own_plan",
    "plan",
    "plan_as_given",
    "plan_of_own_run",
    "reads_dataset",
    "rehearsals_for",
    "several",
    "sweep",
    "training_environment",
]

Told = Callable[[Attempt], None]


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
            hint="Name a card, such as --gpu a100-80gb, or leave --snapshot away.",
        )
    if checks:
        output, device, worker = output_dir(job), rehearsals.hardware, rehearsals.workers.first
        check_preflight(worker, job, device, output, to_train=False, reads_data=False)
    lengths = rehearsals.lengths() if _counts_for_estimate(job) else Lengths(longest=job.prompt_length)
    facts = rehearsals.describe()
    space = rehearsals.space(facts, lengths)
    limit = lengths.longest or (None if job.is_online else facts.context_length)
    trace = rehearsals.rehearse(space.base, replace(lengths, longest=limit))
    found = judge_trace(rehearsals, space.base, trace, lengths)
    if snapshot is not None:
        expandable = found.knobs.expandable_segments
        setting = environment_setting(job.environment, expandable_segments=space.base.expandable_segments)
        write_snapshot(snapshot, make_snapshot(trace, room, expandable_segments=expandable, setting=setting))
    return found


def sweep(
    workers: Workers,
    axes: Sequence[Axis],
    asked: Sequence[Rehearsals | AutofitError],
    told: Callable[[SweepPoint], None] = lambda point: None,
) -> Sweep:
    """Every combination of the axes' settings, each exactly as given; one that is refused does not end the others.

    Args:
        asked: The job of every combination, in the order of ``combinations``, or why there is none.
        told: Hears of every point as it is done, from whichever thread waited for it.

    Raises:
        AutofitError: every point was refused; the error is the first one's.
    """

    def estimated(one: Rehearsals, worker: Worker) -> Estimate:
        return estimate(one.with_worker(worker), checks=False)

    return estimate_all(axes, asked, estimated, workers.map, told)


def plan(
    rehearsals: Rehearsals,
    told: Told = lambda attempt: None,
    hear: Hear = lambda counting: None,
    *,
    to_train: bool = False,
    simulate: bool = False,
) -> Plan:
    """The best configuration that fits the budget: the fastest of the first level of harm that holds one.

    Args:
        told: Hears of every configuration as it has been rehearsed.
        hear: Is told how far the counting of tokens is.
        to_train: The data will be needed, so they are read even where the plan could do without.
        simulate: The training will run on the CPU, under a simulated card.

    Raises:
        DoesNotFitError: nothing that the user allows fits; the message holds the nearest that would.
        ModelError, DatasetError, RehearsalError, BatchSplitError, ContextLengthError.
    """
    started = time.perf_counter()
    job = rehearsals.job
    check_forbid(job.forbid)
    facts = rehearsals.describe()
    checked, lengths = _looked_at(rehearsals, hear, to_train=to_train, simulate=simulate)
    space = rehearsals.space(facts, lengths)

    def least_needed(other: Job, knobs: Knobs) -> Estimate:
        return Predictions(replace(rehearsals, job=other), facts, lengths).rehearse([knobs], whole=True)[0]

    try:
        found = search(space, Predictions(rehearsals, facts, lengths), told)
    except DoesNotFitError as error:
        raise with_alternatives(error, job, space, least_needed) from error
    warnings = check_room(checked, found.estimate.knobs, optimizer_steps(job, found.estimate.knobs, lengths))
    seconds = time.perf_counter() - started
    return make_plan(rehearsals, found, facts, lengths, warnings=map(str, warnings), seconds=seconds)


def follow(
    rehearsals: Rehearsals,
    made: Plan,
    told: Told = lambda attempt: None,
    hear: Hear = lambda counting: None,
    *,
    to_train: bool = False,
    simulate: bool = False,
    again: str = "plan(...).save(path)",
) -> Plan:
    """A plan that was made before, for this job on this device: its settings, with no search.

    It is taken as it is where model, card, versions and all words that a rehearsal depends on are the same; else its
    settings are rehearsed once, and a warning of the plan that comes back says why.

    Args:
        again: How to plan anew, for the hints of errors.

    Raises:
        UsageError: the plan is for another model or method, or its settings contradict the job.
        DoesNotFitError: here its settings take more than there is.
        ModelError, DatasetError, RehearsalError, BatchSplitError, ContextLengthError.
    """
    facts = rehearsals.describe()
    check_subject(made, rehearsals.job, facts, again)
    checked, lengths = _looked_at(rehearsals, hear, to_train=to_train, simulate=simulate)
    followed = follow_plan(rehearsals, made, facts, lengths, told, again=again)
    warnings = check_room(checked, followed.knobs, followed.optimizer_steps)
    return replace(followed, warnings=(*map(str, warnings), *followed.warnings))


def cards(
    rehearsals: Rehearsals,
    devices: Sequence[Hardware],
    told: Callable[[Hardware, Attempt], None] = lambda card, attempt: None,
    hear: Hear = lambda counting: None,
) -> Cards:
    """The best plan for each of many cards; none of them needs to be here.

    Raises:
        ModelError, DatasetError, RehearsalError, BatchSplitError, ContextLengthError.
    """
    job = rehearsals.job
    check_forbid(job.forbid)
    reads, worker = reads_dataset(job, to_train=False), rehearsals.workers.first
    newest = max(devices, key=lambda card: card.compute_capability or ASSUMED_CAPABILITY)  # which can most
    checked = check_preflight(worker, job, newest, output_dir(job), to_train=False, reads_data=reads)
    lengths = _lengths(rehearsals, hear, reads=reads and not checked.data_out_of_reach)
    return compare_cards(rehearsals, devices, lengths, told)


def confirm(
    rehearsals: Rehearsals,
    chosen: Plan,
    *,
    simulate: bool,
    may_move: bool = True,
    on_event: Callable[[Mapping[str, Any]], None] = lambda event: None,
) -> Plan:
    """Try a plan before it trains: two real steps on the longest rows, in a process that then ends.

    Where they need more than predicted, or far less, the plan moves; its ``experience`` holds every probe. Nothing is
    probed where nothing measures (``engine.probe.confirm: is_probed``), nor a plan that was confirmed before, nor
    one that a run goes on with and that nothing has changed since.

    Args:
        may_move: The settings are a search's, not the user's.
        on_event: Hears of it: ``probing``, ``probe``, ``replanned`` and ``room`` events.

    Raises:
        DoesNotFitError: nothing that is allowed fits, by what was measured.
        OutputFolderError, TrainingError, RewardFunctionError, DatasetError, ModelError, InterruptedByUser.
    """
    job = rehearsals.job
    device = training_device(rehearsals.hardware, simulate=simulate)
    goes_on = resumes(job) and chosen.experience != Experience()
    if goes_on or not is_probed(job, device, vllm_share_bytes=rehearsals.vllm_share_bytes):
        return chosen
    folder = launch.prepare_folder(output_dir(job), resuming=resumes(job))
    ways = RealWays(rehearsals=rehearsals, device=device, simulate=simulate, folder=folder, workers=Workers)
    return confirmed(chosen, ways, on_event, may_move=may_move)


def fit(
    rehearsals: Rehearsals,
    chosen: Plan,
    *,
    simulate: bool,
    guarded: bool = True,
    max_restarts: int = RESTARTS,
    on_event: Callable[[Mapping[str, Any]], None] = lambda event: None,
) -> Report:
    """Train with a plan in a process of its own, and in others where it dies; returns predicted against measured.

    The output folder then holds the model, ``plan.json``, ``run.json`` and ``train.log``.

    Args:
        simulate: Train on the CPU while a simulated card of that name keeps account.
        guarded: Else the process trains as TRL does by itself, and ends when the device is full.
        max_restarts: How often in a row another process may go on, without a new checkpoint in between.
        on_event: Hears of every step: ``start``, ``step`` and ``log`` events of ``training.callback``, ``checkpoint``
            and ``save_failed`` ones of ``training.process.checkpointing``, ``restart`` of ``training.supervisor``.

    Raises:
        OutputFolderError: the folder cannot be written or holds another run.
        GpuOutOfMemoryError, TrainingError, DatasetError, ModelError.
        InterruptedByUser: Ctrl-C; what was written is whole.
    """
    job = rehearsals.job
    device = training_device(rehearsals.hardware, simulate=simulate)
    folder = launch.prepare_folder(output_dir(job), resuming=resumes(job))
    chosen = as_begun(chosen)
    write_run(folder, plan_json=chosen.to_json())
    trained = train_supervised(
        rehearsals,
        chosen,
        device,
        folder,
        simulate=simulate,
        guarded=guarded,
        restarts=max_restarts,
        on_event=on_event,
    )
    report, experience = trained.report, trained.plan.experience
    run_json = report.to_json() | {"job": as_recorded(job).to_json(), "experience": experience.to_json()}
    write_run(folder, report_json=run_json)
    if trained.interrupted:
        raise InterruptedByUser(
            f"Interrupted after step {report.steps}; what was written is whole.", hint=how_to_go_on(folder)
        )
    return report


def check_can_train(rehearsals: Rehearsals, *, simulate: bool, overwrite_output_dir: bool = False) -> None:
    """Fail before minutes of planning, not after: is there a device, are there weights, and a folder to write to?

    Raises:
        NoGpuError, ModelNotFoundError, OutputFolderError.
        UsageError: what the method needs beside these is not given, such as a reward; a run cannot be gone on with and
            be moved aside; the mishaps of a simulated card cannot be read.
    """
    training_device(rehearsals.hardware, simulate=simulate)
    job = rehearsals.job
    if simulate:
        check_mishaps(job.environment)
    rehearsals.workers.first.check_can_train(job)
    for name in (job.model, *(job.arguments.get(argument) for argument in REWARD_MODEL_ARGUMENTS)):
        if name:
            _check_weights(pathlib.Path(name))
    check_output(job, overwrite=overwrite_output_dir)


def training_environment(rehearsals: Rehearsals, chosen: Plan, *, simulate: bool) -> dict[str, str]:
    """What would be set for the training process; for a card that is not here, as if it were the first of a machine."""
    device = rehearsals.hardware
    if device.origin in ("named", "imagined"):
        device = replace(device, uuid="0")
    return process_environment(device, chosen.knobs, rehearsals.job.environment, simulate=simulate)


def gpus() -> tuple[Hardware, ...]:
    """The cards that are known by name."""
    return catalog()


def _check_weights(model: pathlib.Path) -> None:
    """A folder is planned for by its config alone, but trained with its weights; a hub id is not looked up here."""
    if model.is_dir() and not any(next(model.glob(kind), None) for kind in ("*.safetensors", "*.bin")):
        raise ModelNotFoundError(
            f"{model} holds no weights (*.safetensors or *.bin), so there is nothing to train.",
            hint="--plan_only plans with the config alone. To train, give a folder made by save_pretrained.",
        )


def _looked_at(rehearsals: Rehearsals, hear: Hear, *, to_train: bool, simulate: bool) -> tuple[Checked, Lengths]:
    """What stands before the first rehearsal: is anything known against the job, and how long are its rows?"""
    job = rehearsals.job
    reads = reads_dataset(job, to_train=to_train)
    checked = check_preflight(
        rehearsals.workers.first,
        job,
        rehearsals.hardware,
        output_dir(job),
        to_train=to_train,
        simulate=simulate,
        reads_data=reads,
    )
    return checked, _lengths(rehearsals, hear, reads=reads and not checked.data_out_of_reach)


def _lengths(rehearsals: Rehearsals, hear: Hear, *, reads: bool) -> Lengths:
    """Of the data, where they are read."""
    return rehearsals.lengths(hear) if reads else Lengths(longest=rehearsals.job.prompt_length)


def _counts_for_estimate(job: Job) -> bool:
    """An estimate counts tokens where it is asked to, and for prompts, whose length nothing else says."""
    if job.is_online:
        return job.prompt_length is None and example_dataset(job) is None
    return is_wish(job.arguments.get(MAX_LENGTH))
