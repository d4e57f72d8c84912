"""Makes real runs on the stand-in device, each in a new process, and caches their records."""

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
"""More than any case needs, so that none runs out of memory."""
CASE_SECONDS = 300.0
"""The time limit of a case. Usually one takes 10 to 30 seconds; one whose end depends on an unknown value may hang."""


class RunFailed(Exception):
    """Raised if a real run ends without a record; the message is the end of its output."""


def model_of(hollow: Hollow, case: GpuCase) -> Path:
    return sparse_folder(hollow.cache / "models", case.model)


def real_run(hollow: Hollow, case: GpuCase) -> Record:
    """Returns the record of a case; makes the run if there is none. Raises RunFailed."""
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
    """Runs a module on the device, with a request made of ``asked`` and the model's folder. Raises RunFailed."""
    environment = hollow.environment(CAPACITY_BYTES, case.allocator) | ENVIRONMENT | ONE_THREAD
    process = Process(module, {"model": str(model_of(hollow, case)), **asked}, environment)
    try:
        error = process.go(limit_seconds)
    finally:
        process.stop()
    if error:
        raise RunFailed(error)
