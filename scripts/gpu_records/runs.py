"""Runs cases one after another, each in a new process, within a time budget. Keeps records and notes failures."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import ROOT

from autotrain_mem.support import codec
from gpu_records.cases import GpuCase
from gpu_records.child import SETTING
from gpu_records.models import model_folder
from gpu_records.record import failure_path, record_path, write_failure

ERROR_CHARACTERS = 4000
"""How much of the end of a failed process's output is kept."""
CASE_SECONDS = 180.0
"""The time limit of a case. Usually one takes 10 to 15 seconds; one that hangs must not use up the others' time."""
SHORTEST_SECONDS = 10.0
"""No case is started with less time left."""
ENVIRONMENT = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as NVML orders devices
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    recorded: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Not started or not finished, because the time was used up."""


Start = Callable[[GpuCase], Any]
"""Starts a :class:`Process` for a case, which waits until :meth:`Process.go`."""


def open_cases(folder: Path, cases: Iterable[GpuCase]) -> list[GpuCase]:
    """Returns the cases without a record; those that failed before come last."""
    missing = [case for case in cases if not record_path(folder, case.name).is_file()]
    return sorted(missing, key=lambda case: failure_path(folder, case.name).is_file())


def run_cases(
    folder: Path, cases: Iterable[GpuCase], start: Start, budget_seconds: float, told: Callable[[str], None] = print
) -> Outcome:
    """Records every case that has no record yet, until the time is used up."""
    began, outcome = time.monotonic(), Outcome()
    coming = open_cases(folder, cases)
    waiting: Any = None
    try:
        for index, case in enumerate(coming):
            left_seconds = budget_seconds - (time.monotonic() - began)
            if left_seconds < SHORTEST_SECONDS:
                outcome.left.extend(each.name for each in coming[index:])
                break
            running = waiting or start(case)
            waiting = start(coming[index + 1]) if index + 1 < len(coming) else None
            case_began = time.monotonic()
            try:
                error = running.go(min(CASE_SECONDS, left_seconds))
            finally:
                running.stop()
            seconds = time.monotonic() - case_began
            if error and time.monotonic() - began >= budget_seconds:
                outcome.left.append(case.name)
            elif error:
                write_failure(folder, case, error)
                outcome.failed.append(case.name)
            else:
                outcome.recorded.append(case.name)
            last_line = error.strip().splitlines()[-1:] or ["recorded"]
            told(f"{case.name:44} {seconds:6.1f} s  {last_line[0][:120]}")
    finally:
        if waiting is not None:
            waiting.stop()
    return outcome


# -- processes -------------------------------------------------------------------------------------------------------


def environment(case: GpuCase, device: str) -> dict[str, str]:
    """Returns the environment of a case's process, with allocator settings, one card or none, and import paths."""
    without = {name: value for name, value in os.environ.items() if name not in (SETTING, "PYTORCH_CUDA_ALLOC_CONF")}
    allocator = {SETTING: case.allocator} if case.allocator else {}
    card = "" if device == "cpu" else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    paths = filter(None, (str(ROOT / "scripts"), str(ROOT), os.environ.get("PYTHONPATH")))
    fixed = {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": card}
    return {**without, **ENVIRONMENT, **allocator, **fixed}


class Process:
    """A new Python process that imports, waits for :meth:`go`, and runs one case. ``module``: ``gpu_records.child``, or
    another module that reads such a request."""

    def __init__(self, module: str, request: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="record-")
        path = Path(self._folder.name) / "request.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        self._log = open(path.with_name("log"), "w+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(path)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
        )

    def go(self, limit_seconds: float) -> str:
        """Lets the process run the case to its end; returns why it failed, or an empty text."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died while importing; the reason is in its log
            self._process.stdin.write(b"go\n")
            self._process.stdin.close()
        try:
            status = self._process.wait(limit_seconds)
            ended = f"ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit_seconds:.0f} s"
        self._log.flush()
        self._log.seek(0)
        said = self._log.read().decode("utf-8", errors="replace")[-ERROR_CHARACTERS:].strip()
        return f"{said}\n{ended}" if ended else ""

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
        self._folder.cleanup()


def start_child(out: Path, models: Path, device: str) -> Start:
    """Returns a function that starts a case's process, and first writes its model if that is missing."""

    def start(case: GpuCase) -> Process:
        model = model_folder(models, case.model)
        request = {"case": codec.to_json(case), "device": device, "out": str(out), "model": str(model)}
        return Process("gpu_records.child", request, environment(case, device))

    return start
