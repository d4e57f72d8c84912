"""Real runs on the stand-in device, each in a fresh process, kept once they are made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gpu_records.cases import GpuCase
from gpu_records.record import Record, failure_path, record_path, write_failure
from gpu_records.runs import ENVIRONMENT

from autotrain_mem.support import codec
from hollow_cuda.build import Hollow
from hollow_cuda.models import sparse_folder

CAPACITY_BYTES = 400 << 30
"""More than any case asks for: what is compared is what it would take."""
CASE_SECONDS = 300.0
"""A case takes 10 to 30. One whose end depends on a value that is not known might go on for ever."""
SAID_CHARACTERS = 4000


class RunFailed(Exception):
    """The real run ended without a record; its text is the end of what it said."""


def model_of(hollow: Hollow, case: GpuCase) -> Path:
    """The folder of the case's model."""
    return sparse_folder(hollow.cache / "models", case.model)


def real_run(hollow: Hollow, case: GpuCase, *, functions: bool = False) -> Record:
    """The record of a case, made now if it is not there.

    Args:
        functions: With torch's own functions in the stack of each allocation, which takes minutes where much is
            generated, and gigabytes.

    Raises:
        RunFailed: the run ended without one.
    """
    out = hollow.cache / "runs"
    if not record_path(out, case.name).is_file():
        _run(hollow, case, out, functions)
    return codec.from_json(Record, json.loads(record_path(out, case.name).read_text(encoding="utf-8")))


def forget(hollow: Hollow, case: GpuCase) -> None:
    """Let the case be run anew."""
    record_path(hollow.cache / "runs", case.name).unlink(missing_ok=True)


def _run(hollow: Hollow, case: GpuCase, out: Path, functions: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    request = out / f"{case.name}.request.json"
    model = model_of(hollow, case)
    asked = {"case": codec.to_json(case), "model": str(model), "out": str(out), "functions": functions}
    request.write_text(json.dumps(asked), encoding="utf-8")
    environment = hollow.environment(CAPACITY_BYTES, case.allocator) | ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hollow_cuda.child", str(request)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CASE_SECONDS)
        error = f"{done.stderr[-SAID_CHARACTERS:]}\nended with status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        error = f"stopped after {CASE_SECONDS:.0f} s"
    request.unlink()
    if error:
        write_failure(out, case, error)
        raise RunFailed(error)
    failure_path(out, case.name).unlink(missing_ok=True)
