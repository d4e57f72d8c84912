"""Gathers what a report shows of a plan or a run: from its files, from the cache, or by rehearsing it again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotrain_mem.allocator.settings import environment_settings
from autotrain_mem.estimator.replay import DeviceCapacity
from autotrain_mem.estimator.timeline import make_timeline
from autotrain_mem.machine.catalog import catalog
from autotrain_mem.machine.prices import listed_prices
from autotrain_mem.planning.kept_answers import job_key
from autotrain_mem.planning.rehearsals import Rehearsals, Subject
from autotrain_mem.report.formatting import command_of
from autotrain_mem.report.page.content import page_of
from autotrain_mem.report.page.render import MARKER, page_html
from autotrain_mem.report.run_history import read_history
from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError, PlanFileError
from autotrain_mem.support.files import OUTPUT_FOLDER, check_replaceable, read_start, refusal, replace_file
from autotrain_mem.support.store import Store
from autotrain_mem.support.units import KIB
from autotrain_mem.types import Plan, Report, Trace
from autotrain_mem.types.data import DataProfile
from autotrain_mem.types.hardware import kernel_class, lacks_bf16
from autotrain_mem.types.page import CardOffer, Material, Page, Timeline
from autotrain_mem.types.plan_file import PLAN_NAME
from autotrain_mem.types.report import RUN_NAME
from autotrain_mem.worker.pool import Workers

_TIMELINE, _ROWS = "timeline", "row lengths"
"""The kinds of cache entries for a plan's report."""
_OTHER_VERSIONS = (
    "The first figure was rehearsed with other versions than the plan was: it peaks at {now} bytes allocated, and the "
    "plan at {then}. Plan again for figures that agree."
)


def keep_for_report(subject: Subject, plan: Plan) -> None:
    """Caches what a plan's report shows and its file does not hold; then drops the traces."""
    key, store = _key(plan), subject.footprint_store
    trace = subject.traces.get(subject.trace_key(plan.knobs, plan.row_tokens))
    if trace is not None and store.get(_TIMELINE, key) is None:
        store.put(_TIMELINE, key, codec.to_json(_drawn(plan, trace)))
    if subject.lengths.profile is not None:
        store.put(_ROWS, key, codec.to_json(subject.lengths.profile))
    subject.traces.clear()


def material_of(
    path: str | Path,
    store: Store,
    *,
    workers: Callable[[], Workers] | None,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Material:
    """Gathers what is known of a plan's file or of an output folder.

    Args:
        workers: Starts workers that rehearse the plan if its timeline is not cached; None to do without.
        on_progress: Called with a text before a step that takes seconds.

    Raises:
        PlanFileError: there is no plan, or it cannot be read.
    """
    plan, folder = Plan.load(path), Path(path)
    is_run = folder.is_dir()
    report = None
    with contextlib.suppress(OSError, ValueError):  # the run has not ended, or the file cannot be read
        values = json.loads((folder / RUN_NAME).read_text(encoding="utf-8"))
        known = {name: value for name, value in values.items() if name not in ("versions", "job", "experience")}
        report = codec.from_json(Report, known)
    timeline, missing = _timeline(plan, store, workers, on_progress)
    rows = store.get(_ROWS, _key(plan))
    written = datetime.fromtimestamp(folder.stat().st_mtime, UTC).isoformat(timespec="seconds")
    no_run = "What the run measured at its end is not shown: it has not ended, or died."
    return Material(
        plan=plan,
        command=command_of(plan, trains=is_run),
        made=(report.ended_at if report is not None else "") or written,
        timeline=timeline,
        report=report,
        history=read_history(folder) if is_run else None,
        profile=None if rows is None else codec.from_json(DataProfile, rows),
        cards=tuple(_offers(plan)),
        not_shown=tuple(filter(None, (missing, no_run if is_run and report is None else ""))),
    )


# -- the rehearsed step ------------------------------------------------------------------------------------------------


def _timeline(
    plan: Plan, store: Store, workers: Callable[[], Workers] | None, on_progress: Callable[[str], None]
) -> tuple[Timeline | None, str]:
    """Returns the cached or newly rehearsed timeline, and a note on it; the note may be empty."""
    kept = store.get(_TIMELINE, _key(plan))
    if kept is not None:
        # A probe may since have measured the memory outside torch.
        return replace(codec.from_json(Timeline, kept), budget_bytes=plan.estimate.reservable_bytes), ""
    missing = "Memory over the rehearsed step is not shown: "
    if plan.objects is not None:
        return None, f"{missing}the plan was made of a script's own objects, which no file holds."
    if workers is None:
        return None, f"{missing}nothing of its rehearsal is kept here. autofit report rehearses it again."
    on_progress("rehearsing the plan, which is not cached here")
    try:
        with workers() as pool:
            rehearsals = Rehearsals(
                workers=pool, job=plan.job, defaults=plan.defaults, hardware=plan.estimate.hardware, store=store
            )
            if plan.model_digest != rehearsals.describe().digest:
                raise PlanFileError(f"{plan.model} is another model now.", hint="Plan again.")
            kernels = kernel_class(rehearsals.hardware.capability)
            trace = pool.first.rehearse(plan.job, plan.knobs, plan.row_tokens, kernels)
    except AutofitError as error:
        return None, f"{missing}the plan could not be rehearsed again: {error.message}"
    timeline = _drawn(plan, trace)
    store.put(_TIMELINE, _key(plan), codec.to_json(timeline))
    now = sum(column[timeline.peak] for column in timeline.owners.values())
    then = plan.estimate.memory.peak_allocated_bytes
    differs = now != then and not plan.experience.probes
    return timeline, _OTHER_VERSIONS.format(now=f"{now:,}", then=f"{then:,}") if differs else ""


def _drawn(plan: Plan, trace: Trace) -> Timeline:
    estimate = plan.estimate
    room = DeviceCapacity(
        capacity_bytes=estimate.reservable_bytes,
        total_bytes=estimate.hardware.total_bytes,
        settings=environment_settings(plan.job.environment),
        caches=estimate.hardware.origin != "cpu",
    )
    name = "rehearsed step" if plan.knobs.processes == 1 else "rehearsed step of rank 0, which stands for all"
    return make_timeline(trace, room, grows=plan.estimate.grows, name=name)


def _key(plan: Plan) -> dict[str, Any]:
    """Returns the cache key of a plan's rehearsal on its device."""
    return {
        "job": job_key(plan.job),
        "model": plan.model_digest,
        "knobs": codec.to_json(plan.knobs.as_rehearsed()),
        "tokens": plan.row_tokens,
        "card": plan.estimate.hardware.name,
        "memory": plan.estimate.hardware.total_bytes,
        "allocator": plan.allocator,
        "versions": dict(plan.versions),
    }


def _offers(plan: Plan) -> list[CardOffer]:
    """Compares what the plan reserves with each known card that runs the same kernels."""
    estimate, capability = plan.estimate, plan.estimate.hardware.capability
    if estimate.hardware.origin == "cpu" or estimate.vllm_share_bytes:
        return []
    prices = listed_prices()
    return [
        CardOffer(
            hardware=card,
            required_bytes=estimate.reserved_bytes
            + card.non_torch_bytes
            + card.communicator_bytes * plan.knobs.communicators,
            budget_bytes=card.budget_bytes(),
            price=prices.get(card.name),
        )
        for card in catalog(laptops=False)
        if kernel_class(card.capability) == kernel_class(capability)
        and lacks_bf16(card.capability) == lacks_bf16(capability)
    ]


REPORT_NAME = "report.html"
"""The name in an output folder; beside a plan's file the name is ``NAME.report.html``."""
OUT = "--out a file"
_MARKED_BYTES = 4 * KIB
"""The first bytes of a file that are searched for the marker of a report."""


def report_path(path: str | Path) -> Path:
    """Returns the path of a report: beside a plan's file, or in an output folder."""
    place = Path(path)
    if place.is_dir():
        return place / REPORT_NAME
    return place.with_name(REPORT_NAME if place.name == PLAN_NAME else f"{place.stem}.report.html")


def check_report_place(file: Path, place: str = OUT) -> None:
    """Rejects a path that a report may not be written to, before anything is rehearsed.

    Raises:
        OutputFolderError: the path is a file that is not a report, its folder is missing, or it may not be written.
    """

    def is_report(file: Path) -> bool:
        start = read_start(file, _MARKED_BYTES)
        return not start.strip() or MARKER.encode() in start

    check_replaceable(file, place, "report", is_report)


def write_report(file: Path, page: Page, place: str = OUT) -> None:
    """Writes a page atomically. Raises OutputFolderError."""
    html = page_html(page)
    check_report_place(file, place)
    try:
        replace_file(file, html.encode())
    except OSError as error:
        raise refusal(file, error, place) from error


def write_run_report(folder: Path, store: Store, on_event: Callable[[Mapping[str, Any]], None]) -> None:
    """Writes the report of a run into its folder, and sends a ``report`` event with its ``path``.

    An error becomes a ``note``, since a training must not fail because of its report.
    """
    file = report_path(folder)
    try:
        write_report(file, page_of(material_of(folder, store, workers=None)), OUTPUT_FOLDER)
    except (AutofitError, OSError, ValueError) as error:
        reason = error.message if isinstance(error, AutofitError) else str(error)
        on_event({"event": "note", "message": f"the report could not be written: {reason}"})
    else:
        on_event({"event": "report", "path": str(file)})
