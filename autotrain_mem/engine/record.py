"""The records of a run in its output folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotrain_mem.files import write_json
from autotrain_mem.spec.plan import PLAN_NAME
from autotrain_mem.spec.report import RUN_NAME


def write_run(
    folder: Path, *, plan_json: dict[str, Any] | None = None, report_json: dict[str, Any] | None = None
) -> None:
    """Write ``plan.json``, ``run.json`` or both: the plan is known before the run, the report after it.

    Raises:
        OutputFolderError: a file cannot be written; what was there before still is.
    """
    if plan_json is not None:
        write_json(folder / PLAN_NAME, plan_json)
    if report_json is not None:
        write_json(folder / RUN_NAME, report_json)
