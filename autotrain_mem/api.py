"""Provides the main functions, which estimate a configuration, find the best one that fits, and train with it.

``estimate`` rehearses one configuration, ``plan`` searches for the best that fits, ``fit`` trains with it. A
:class:`Rehearsals` holds what the three share: the job, the device, and the workers that rehearse.
"""

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from autotrain_mem.allocator.settings import environment_setting
from autotrain_mem.estimator.snapshot import make_snapshot
from autotrain_mem.machine.catalog import catalog
from autotrain_mem.machine.choose import choose, several, training_device
from autotrain_mem.machine.detect import VISIBLE, detect
from autotrain_mem.machine.doctor import examine_machine
from autotrain_mem.planning.accelerate_config import with_accelerate
from autotrain_mem.planning.follow_plan import check_subject, follow_plan
from autotrain_mem.planning.maximum import settled
from autotrain_mem.planning.mixed_lengths import with_reason
from autotrain_mem.planning.output_dir import output_dir
from autotrain_mem.planning.plan import compare_cards, make_plan, plan_as_given, searched_with_images
from autotrain_mem.planning.predictions import Predictions, judge_trace
from autotrain_mem.planning.preflight import check_preflight, check_room, examine
from autotrain_mem.planning.read_request import PlanHints, rehearsals_for, resumed, with_plan
from autotrain_mem.planning.rehearsals import OnCounting, Rehearsals, example_dataset, reads_dataset
from autotrain_mem.planning.run_request import RunRequest, check_launch
from autotrain_mem.report.estimate_view import write_snapshot
from autotrain_mem.report.page.content import page_of
from autotrain_mem.run.confirm import probed
from autotrain_mem.run.early import check_to_train, opened
from autotrain_mem.run.report_material import (
    check_report_place,
    keep_for_report,
    material_of,
    report_path,
    write_report,
    write_run_report,
)
from autotrain_mem.run.several_machines import leading
from autotrain_mem.run.supervised import SupervisedRun, hold_output
from autotrain_mem.search.memo import OnAttempt
from autotrain_mem.settings.levers import LEVERS, SMALLER_IMAGES
from autotrain_mem.settings.words import MOST, RESTARTS
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.store import Store, cache_folder
from autotrain_mem.support.versions import versions_key
from autotrain_mem.training.environment import process_environment
from autotrain_mem.training.machines.lead import Machines
from autotrain_mem.training.run_folder import OnEvent, RunFolder, is_under_way
from autotrain_mem.types import AutoFit, Candidate, Cards, Estimate, Hardware, Page, Plan, Report
from autotrain_mem.types.hardware import ASSUMED_CAPABILITY
from autotrain_mem.worker.client import Worker
from autotrain_mem.worker.pool import Workers

__all__ = ["begin", "cards", "estimate", "fit", "plan", "train", "training_environment"]
__all__ += ["LEVERS", "RESTARTS", "Machines", "PlanHints", "Rehearsals", "RunRequest"]
__all__ += ["Worker", "Workers", "catalog", "check_launch", "choose"]
__all__ += ["example_dataset", "opened", "output_dir", "plan_as_given", "reads_dataset"]
__all__ += ["check_report_place", "is_under_way", "report_page", "report_path", "write_report", "write_run_report"]
__all__ += ["examine_machine", "versions_key"]
__all__ += ["compared", "detect", "leading", "rehearsals_for", "resumed", "with_accelerate", "with_plan"]


def begin(
    workers: Workers,
    request: RunRequest,
    warn: Callable[[str], None],
    *,
    to_train: bool,
    machines: Machines | None = None,
) -> Rehearsals:
    """Reads the requested job (:func:`rehearsals_for`). To train, it also checks device, weights and output folder.
    ``machines``: the other machines of the training, as :func:`leading` yields them.

    Raises:
        TrainingError: another machine did not connect.
        UsageError: data or something else that the method needs, such as a reward, is missing; a run is to be both
            resumed and moved aside; or ``AUTOFIT_MISHAPS`` of a simulated card is invalid.
        NoGpuError, UnknownGpuError, UnreadableGpuError, ModelNotFoundError, OutputFolderError: see ``support.errors``.
    """
    if to_train and (request.autofit.nodes or 1) > 1 and machines is None:
        raise UsageError(
            f"--nodes {request.autofit.nodes}: only the command trains on several machines, not Python.",
            hint="Start autofit on each machine, or run a script with a trainer of autotrain_mem by accelerate launch.",
        )
    rehearsals = rehearsals_for(workers, request, warn)
    if to_train:
        job = rehearsals.job
        device = training_device(rehearsals.hardware, simulate=request.simulate, environment=job.environment)
        if request.simulate:
            from autotrain_mem.machine import fault_injection  # only for simulated cards

            fault_injection.parse_mishaps({**os.environ, **job.environment}.get(fault_injection.VARIABLE, ""))
        check_to_train(job, request)
        if machines is not None:  # plans for the smallest free memory of all machines
            there, planned_for = machines.gather(device), rehearsals.hardware
            free_bytes = min(planned_for.free_bytes, there.free_bytes)
            topology = replace(planned_for.topology, nodes=there.topology.nodes)
            return rehearsals.on(replace(planned_for, free_bytes=free_bytes, topology=topology))
    return rehearsals


def train(
    rehearsals: Rehearsals,
    chosen: Plan,
    request: RunRequest,
    on_event: OnEvent = lambda event: None,
    *,
    machines: Machines | None = None,
) -> Report:
    """Probes a plan, unless the request turns this off, and trains with it. Writes a report even if training fails.

    ``on_event`` gets the events of :func:`fit` and ``run.confirm.confirmed``, and also ``moved_aside`` and ``report``.
    """
    with hold_output(rehearsals.job, on_event, overwrite=request.overwrite_output_dir) as folder:
        if request.probe:
            chosen = probed(rehearsals, chosen, request, folder.path, on_event, machines)
        try:
            return fit(
                rehearsals,
                chosen,
                simulate=request.simulate,
                guarded=request.autofit.guard,
                max_restarts=request.max_restarts,
                on_event=on_event,
                folder=folder,
                machines=machines,
            )
        finally:
            write_run_report(folder.path, rehearsals.store, on_event)


def estimate(rehearsals: Rehearsals, snapshot: pathlib.Path | None = None) -> Estimate:
    """Estimates one configuration exactly as given (``verbs.estimate``). ``snapshot``: a file for the predicted history
    of allocations, in the format of ``torch.cuda.memory._dump_snapshot``; raises OutputFolderError if it cannot be
    written."""
    job = rehearsals.job
    if job.maximized is not None:
        raise UsageError(
            f"--{job.maximized} {MOST} searches for the largest value that fits, and an estimate does not search.",
            hint=f"Give a number, or run autofit plan {job.method} ... --{job.maximized} {MOST}.",
        )
    if snapshot is not None and not rehearsals.caches:
        raise UsageError(
            "--snapshot records the caching allocator of a GPU, and the CPU has none.",
            hint="Name a card, such as --gpu a100-80gb, or remove --snapshot.",
        )
    check_preflight(rehearsals, reads_data=False)
    facts = rehearsals.describe()
    counted = rehearsals.lengths_to_estimate(facts)
    subject = rehearsals.subject(facts, counted)
    base = subject.space().base
    limited = replace(counted, longest=counted.longest or (None if job.is_online else facts.context_length))
    trace = replace(subject, lengths=limited).rehearse(base)
    estimated = judge_trace(subject, base, trace)
    subject = replace(subject, lengths=limited)
    subject = subject.with_named_rows() if subject.caches else subject
    predictions = Predictions(subject)
    predictions.remember(base, subject.row_length(base), trace)
    estimated = with_reason(predictions.over_steps(estimated), subject)
    if snapshot is not None:
        setting = environment_setting(job.environment, grows=base.expandable_segments)
        write_snapshot(snapshot, make_snapshot(trace, subject.room(base), grows=estimated.grows, setting=setting))
    return estimated


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
    """Returns the best configuration that fits the budget (``verbs.plan``), or follows the plan ``earlier``.

    Args:
        on_counting: Called with the progress of counting tokens.
        to_train: Whether to read the data even if the plan could do without, since training needs them.
        simulate: Whether the training will run on the CPU, with a simulated card.
        again: The call that makes the earlier plan again, for the hints of errors (``planning.follow_plan``).
    """
    started = time.perf_counter()
    if earlier is not None and SMALLER_IMAGES not in rehearsals.job.arguments:  # to count the tokens of its image size
        rehearsals = rehearsals.with_max_pixels(earlier.knobs.max_pixels)
    job = rehearsals.job
    facts = rehearsals.describe()
    if earlier is not None:
        check_subject(earlier, job, facts, again)
    checked, lengths = examine(rehearsals, on_counting, to_train=to_train, simulate=simulate)
    subject = rehearsals.subject(facts, lengths)
    if earlier is not None:
        chosen = follow_plan(subject, earlier, on_attempt, again=again)
    else:
        subject, found = searched_with_images(subject, on_attempt)
        chosen = make_plan(subject, found, seconds=time.perf_counter() - started)
    warnings = check_room(checked, rehearsals, chosen.estimate, chosen.optimizer_steps)
    keep_for_report(subject, chosen, earlier)
    return replace(chosen, warnings=(*map(str, warnings), *chosen.warnings))


def cards(
    rehearsals: Rehearsals,
    devices: Sequence[Hardware],
    on_attempt: Callable[[Hardware, Candidate], None] = lambda card, attempt: None,
    on_counting: OnCounting = lambda counting: None,
) -> Cards:
    """Returns the best plan for each of many cards (``verbs.cards``)."""
    newest = max(devices, key=lambda card: card.compute_capability or ASSUMED_CAPABILITY)  # the most capable
    _, lengths = examine(replace(rehearsals, hardware=newest), on_counting)
    return compare_cards(rehearsals, devices, lengths, on_attempt)


def compared(autofit: AutoFit) -> tuple[Hardware, ...]:
    """Returns the devices that a request compares; empty if it names only one."""
    return several(autofit.gpu or "", autofit.gpu_counts, nodes=autofit.nodes or 1, link=autofit.link)


def fit(
    rehearsals: Rehearsals,
    chosen: Plan,
    *,
    simulate: bool,
    guarded: bool = True,
    max_restarts: int = RESTARTS,
    on_event: OnEvent = lambda event: None,
    folder: RunFolder | None = None,
    machines: Machines | None = None,
) -> Report:
    """Trains with a plan in a separate process; if that process dies, in a new one (see ``verbs.fit``).

    Args:
        guarded: Whether to guard the process; otherwise it trains exactly as TRL does, and fails when out of memory.
        on_event: Called with ``start``, ``step`` and ``log`` events of ``training.process.train``, ``checkpoint`` and
            ``save_failed`` events of ``training.process.checkpointing``, and ``restart`` of ``training.supervisor``.
        folder: The output folder, if the caller holds it already.
        machines: The other machines of the training; None for one machine.
    """
    device = training_device(rehearsals.hardware, simulate=simulate, environment=rehearsals.job.environment)
    rehearsals = replace(rehearsals, job=settled(rehearsals.job, chosen.knobs))
    with hold_output(rehearsals.job, on_event) if folder is None else contextlib.nullcontext(folder) as held:
        run = SupervisedRun(
            rehearsals=rehearsals,
            plan=chosen,
            device=device,
            output=held,
            simulate=simulate,
            guarded=guarded,
            on_event=on_event,
            machines=machines,
        )
        return run.finish(restarts=max_restarts)


def report_page(path: str | pathlib.Path) -> Page:
    """Makes the page of a plan's file or an output folder. Raises PlanFileError if the plan cannot be read."""
    return page_of(material_of(path, Store(cache_folder())))


def training_environment(rehearsals: Rehearsals, chosen: Plan, *, simulate: bool) -> dict[str, str]:
    """Returns the environment variables to set for the training process. A card that was only given by name is taken to
    be the first card that the job's environment makes visible, or else the machine's first."""
    device = rehearsals.hardware
    if device.origin in ("named", "imagined"):
        first, _, _ = rehearsals.job.environment.get(VISIBLE, "").partition(",")
        device = replace(device, uuid=first or "0")
    return process_environment(device, chosen.knobs, rehearsals.job.environment, simulate=simulate)
