"""Writes the report of a plan or of a run as one HTML file, over an earlier report and over nothing else."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotrain_mem.report.page.content import page_of
from autotrain_mem.report.page.render import MARKER, page_html
from autotrain_mem.run.report_material import material_of
from autotrain_mem.support.errors import AutofitError, OutputFolderError
from autotrain_mem.support.files import OUTPUT_FOLDER, read_start, refusal, replace_file
from autotrain_mem.support.store import Store
from autotrain_mem.support.units import KIB
from autotrain_mem.types.page import Page
from autotrain_mem.types.plan_file import PLAN_NAME

REPORT_NAME = "report.html"
"""In an output folder; beside a plan's file it is ``NAME.report.html``."""
OUT = "--out a file"
_MARKED_BYTES = 4 * KIB
"""How far into a file the marker of a report may stand."""


def report_path(path: str | Path) -> Path:
    """Names the file beside a plan, or in an output folder."""
    place = Path(path)
    if place.is_dir():
        return place / REPORT_NAME
    return place.with_name(REPORT_NAME if place.name == PLAN_NAME else f"{place.stem}.report.html")


def check_report_place(file: Path, place: str = OUT) -> None:
    """Refuses a place that a report may not be written to, before anything is rehearsed.

    Raises:
        OutputFolderError: a file is there that is no report, its folder is not there, or it may not be written.
    """
    try:
        if not file.parent.is_dir():
            raise OSError(errno.ENOENT, "")
        if not os.access(file.parent, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, "")
        is_taken = file.exists() and not _may_be_replaced(file)
    except OSError as error:
        raise refusal(file, error, place) from error
    if is_taken:
        message = f"{file} exists and is not a report, so it is not overwritten."
        raise OutputFolderError(message, hint=f"Move it away, or give {place} elsewhere.")


def write_report(file: Path, page: Page, place: str = OUT) -> None:
    """Writes a page in one step. Raises OutputFolderError, and MissingExtraError where uPlot is not installed."""
    html = page_html(page)
    check_report_place(file, place)
    try:
        replace_file(file, html.encode())
    except OSError as error:
        raise refusal(file, error, place) from error


def write_run_report(folder: Path, store: Store, on_event: Callable[[Mapping[str, Any]], None]) -> None:
    """Writes the report of a run into its folder by what is at hand, and sends ``report`` with its ``path``.

    A training is not to fail over its report: what goes wrong is a ``note``.
    """
    file = report_path(folder)
    try:
        write_report(file, page_of(material_of(folder, store, workers=None)), OUTPUT_FOLDER)
    except (AutofitError, OSError, ValueError) as error:
        reason = error.message if isinstance(error, AutofitError) else str(error)
        on_event({"event": "note", "message": f"the report could not be written: {reason}"})
    else:
        on_event({"event": "report", "path": str(file)})


def _may_be_replaced(file: Path) -> bool:
    """Tells whether a file is a report, or empty. Raises OSError where it cannot be read."""
    start = read_start(file, _MARKED_BYTES)
    return not start.strip() or MARKER.encode() in start
