"""Real runs on the stand-in device, each in a fresh process, kept once they are made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import ONE_THREAD
from gpu_records.cases import GpuCase
from gpu_records.record import Record, record_path, write_failure
from gpu_records.runs import ENVIRONMENT, Process

from autotrain_mem.support import codec
from hollow_cuda.build import Hollow
from hollow_cuda.models import sparse_folder

CAPACITY_BYTES = 400 << 30
"""More than any case asks for: what is compared is what it would take."""
CASE_SECONDS = 300.0
"""A case takes 10 to 30. One whose end depends on a value that is not known might go on for ever."""


class RunFailed(Exception):
    """The real run ended without a record; its text is the end of what it said."""


def model_of(hollow: Hollow, case: GpuCase) -> Path:
    return sparse_folder(hollow.cache / "models", case.model)


def real_run(hollow: Hollow, case: GpuCase) -> Record:
    """The record of a case, made now if it is not there. Raises RunFailed."""
    out = hollow.cache / "runs"
    if not record_path(out, case.name).is_file():
        try:
            asked = {"case": codec.to_json(case), "out": str(out)}
            run_child("hollow_cuda.child", hollow, case, asked, CASE_SECONDS)
        except RunFailed as error:
            write_failure(out, case, str(error))
            raise
    return codec.from_json(Record, json.loads(record_path(out, case.name).read_text(encoding="utf-8")))


def run_child(module: str, hollow: Hollow, case: GpuCase, asked: Mapping[str, Any], limit_seconds: float) -> None:
    """Run a module on the device, which reads what is asked, and the folder of the model. Raises RunFailed."""
    environment = hollow.environment(CAPACITY_BYTES, case.allocator) | ENVIRONMENT | ONE_THREAD
    process = Process(module, {"model": str(model_of(hollow, case)), **asked}, environment)
    try:
        error = process.go(limit_seconds)
    finally:
        process.stop()
    if error:
        raise RunFailed(error)
