"""Collects the material of a report on a plan or a run from its files and the cache, and writes the HTML page."""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotrain_mem.estimator.memory import make_timeline
from autotrain_mem.planning.kept_answers import job_key
from autotrain_mem.planning.rehearsals import Subject
from autotrain_mem.report.formatting import command_of
from autotrain_mem.report.page.content import page_of
from autotrain_mem.report.page.render import MARKER, page_html
from autotrain_mem.report.run_history import read_history
from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError
from autotrain_mem.support.files import OUTPUT_FOLDER, check_replaceable, read_object, read_start, replace_file, writing
from autotrain_mem.support.store import Store
from autotrain_mem.support.units import KIB
from autotrain_mem.types import PLAN_NAME, RUN_NAME, DataProfile, Material, Page, Plan, Report, Timeline
from autotrain_mem.types.hardware import kernel_class

_TIMELINE, _ROWS = "timeline", "row lengths"
"""The kinds of cache entries for a plan's report."""


def keep_for_report(subject: Subject, plan: Plan, earlier: Plan | None = None) -> None:
    """Caches the parts of a report that the plan's file lacks, and discards the traces of the rehearsals. ``earlier``:
    the plan that was followed, whose timeline holds if it was not rehearsed again."""
    key, store = _key(plan), subject.footprint_store
    trace = subject.traces.get(subject.trace_key(plan.knobs, plan.row_tokens))
    if store.get(_TIMELINE, key) is None:
        drawn = None if earlier is None else store.get(_TIMELINE, _key(earlier))
        if trace is not None:
            ranks = "" if plan.knobs.processes == 1 else " of rank 0, representative of all ranks"
            room, name = subject.endless_room, f"rehearsed step{ranks}"
            drawn = codec.to_json(make_timeline(trace, room, grows=plan.estimate.grows, name=name))
        if drawn is not None:
            store.put(_TIMELINE, key, drawn)
    if subject.lengths.profile is not None:
        store.put(_ROWS, key, codec.to_json(subject.lengths.profile))
    subject.traces.clear()


def material_of(path: str | Path, store: Store) -> Material:
    """Collects the material from a plan's file or an output folder. Raises PlanFileError if there is no plan."""
    plan, folder = Plan.load(path), Path(path)
    is_run = folder.is_dir()
    report, timeline, history, not_shown = None, None, None, []
    with contextlib.suppress(OSError, ValueError):  # the run has not ended, or the file cannot be read
        values = read_object(folder / RUN_NAME)
        json.dumps(values, allow_nan=False)  # ``write_json`` writes neither nan nor infinity
        known = {name: value for name, value in values.items() if name not in ("versions", "job", "experience")}
        report = codec.from_json(Report, known)
    drawn, rows = (store.get(kind, _key(plan)) for kind in (_TIMELINE, _ROWS))
    missing = ["the memory timeline of the rehearsed step"] if drawn is None else []
    missing += ["the row lengths"] if rows is None and plan.data is not None else []
    if missing:
        not_shown.append(f"Not in the cache, so not shown: {' and '.join(missing)}. Plan again with an empty cache.")
    if drawn is not None:  # the key has no card, so that all cards with the same kernels share a timeline
        timeline = replace(codec.from_json(Timeline, drawn), budget_bytes=plan.estimate.reservable_bytes)
    if is_run and report is None:
        not_shown.append("The run's final measurements are missing, since it has not ended or was killed.")
    try:
        history = read_history(folder) if is_run else None
    except OSError as error:
        not_shown.append(f"The run's history cannot be read: {error.strerror}.")
    written = datetime.fromtimestamp(folder.stat().st_mtime, UTC).isoformat(timespec="seconds")
    return Material(
        plan=plan,
        command=command_of(plan, trains=is_run),
        made=(report.ended_at if report is not None else "") or written,
        timeline=timeline,
        report=report,
        history=history,
        profile=None if rows is None else codec.from_json(DataProfile, rows),
        not_shown=tuple(not_shown),
    )


def _key(plan: Plan) -> dict[str, Any]:
    return {
        "job": job_key(plan.job),
        "model": plan.model_digest,
        "knobs": codec.to_json(plan.knobs.as_rehearsed()),
        "tokens": plan.row_tokens,
        "kernels": kernel_class(plan.estimate.hardware.capability),
        "allocator": plan.allocator,
        "versions": dict(plan.versions),
    }


REPORT_NAME = "report.html"
"""The report's name in an output folder; beside a plan's file the name is ``NAME.report.html``."""
OUT = "--out a file"
_MARKED_BYTES = 4 * KIB
"""A report's marker is within this many bytes of the start of its file."""


def report_path(path: str | Path) -> Path:
    """Returns the path of a report: beside a plan's file, or in an output folder."""
    place = Path(path)
    if place.is_dir():
        return place / REPORT_NAME
    return place.with_name(REPORT_NAME if place.name == PLAN_NAME else f"{place.stem}.report.html")


def check_report_place(file: Path, place: str = OUT) -> None:
    """Raises OutputFolderError if another file is at the path, or the path cannot be written."""

    def is_report(file: Path) -> bool:
        start = read_start(file, _MARKED_BYTES)
        return not start.strip() or MARKER.encode() in start

    check_replaceable(file, place, "report", is_report)


def write_report(file: Path, page: Page, place: str = OUT) -> None:
    """Writes a page atomically. Raises OutputFolderError like :func:`check_report_place`, or if writing fails."""
    html = page_html(page)
    check_report_place(file, place)
    with writing(file, place):
        replace_file(file, html.encode())


def write_run_report(folder: Path, store: Store, on_event: Callable[[Mapping[str, Any]], None]) -> None:
    """Writes a run's report into its folder and sends a ``report`` event; an error only becomes a ``note``."""
    file = report_path(folder)
    try:
        write_report(file, page_of(material_of(folder, store)), OUTPUT_FOLDER)
    except (AutofitError, OSError, ValueError) as error:
        reason = error.message if isinstance(error, AutofitError) else str(error)
        on_event({"event": "note", "message": f"The report could not be written: {reason}"})
    else:
        on_event({"event": "report", "path": str(file)})
