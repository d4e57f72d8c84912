"""Runs one command on the stand-in device that computes, and checks its result."""

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from bench import ONE_THREAD
from hollow_cuda.build import Hollow
from survival_cases.kept import Row

from autotrain_mem.support.units import parse_bytes
from command_cases.cases import CAPACITY_MIB, MIB, STEPS, Case

LIMIT_SECONDS = 400.0
TRAINING = "autotrain_mem.training.process.main"
AMOUNT = r"([\d.]+ \w+)"
FIGURES = {
    "probe": re.compile(f"needs {AMOUNT} of {AMOUNT}, predicted {AMOUNT}"),
    "allocated": re.compile(f"{AMOUNT} allocated predicted, {AMOUNT} measured"),
    "reserved": re.compile(f"{AMOUNT} reserved predicted, {AMOUNT} measured"),
}
"""Patterns for predicted and measured figures in a command's output; a probe's include memory outside torch."""
NEAR = 1e-3
SPLIT = "the prediction is for whole micro-batches, and some were split"
LOSSES = re.compile(r"\bloss (\S+ -> [\d.]+)")


def run(case: Case, hollow: Hollow, place: Path, losses: Mapping[str, str]) -> Row:
    """Returns a case's row: ``outcome`` ("passed", or what is wrong), figures, losses, seconds. ``losses``: the printed
    losses of earlier cases, by name."""
    output = place / "runs" / f"{_slug(case.name)}.txt"
    started = time.monotonic()
    code = _execute(case, hollow, place, output)
    text = output.read_text(encoding="utf-8", errors="replace")
    return {
        "outcome": "; ".join(_missed(case, code, text, losses)) or "passed",
        "figures": figures(text),
        "losses": (LOSSES.findall(text) or [""])[-1],
        "seconds": round(time.monotonic() - started, 1),
    }


def figures(text: str) -> list[dict[str, Any]]:
    """Returns all pairs of predicted and measured bytes in a command's output.

    ``judged`` is false if the command reports that micro-batches were split, for which the prediction does not hold.
    """
    found, whole = [], SPLIT not in " ".join(text.split())
    for kind, pattern in FIGURES.items():
        for groups in pattern.findall(text):
            predicted, measured = (groups[2], groups[0]) if kind == "probe" else groups
            sizes = {"predicted": parse_bytes(predicted), "measured": parse_bytes(measured)}
            found.append({"kind": kind, **sizes, "judged": whole or kind == "probe"})
    return found


def recorded(case: Case, place: Path) -> dict[str, Any]:
    """Returns a run's peaks and the settings to rehearse it, for a test that runs without the CUDA build."""
    folder = place / "runs" / _slug(case.name)
    plan, report = (json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("plan", "run"))
    job = {name: plan["job"][name] for name in ("method", "arguments")}
    arguments = {name: value for name, value in job["arguments"].items() if name != "output_dir"}
    measured = {name: report["measured"][name] for name in ("peak_allocated_bytes", "peak_reserved_bytes")}
    return {
        "name": case.name,
        **job,
        "arguments": arguments,
        "knobs": plan["knobs"],
        "length": plan["row_tokens"],
        **measured,
    }


def _execute(case: Case, hollow: Hollow, place: Path, output: Path) -> int | None:
    """Runs a case's command; returns its exit code, or None if it had to be killed."""
    folder, ledger = place / "runs" / _slug(case.name), place / "ledgers" / _slug(case.name)
    for path in (folder, ledger):
        shutil.rmtree(path, ignore_errors=True)
    ledger.mkdir(parents=True)
    output.parent.mkdir(exist_ok=True)
    command = [*case.argv] if case.is_script else ["-m", "autotrain_mem.cli.main", *case.argv]
    if not case.is_script or "autotrain_mem.cli.main" in case.argv:
        command += ["--output_dir", str(folder)]
    environment = _environment(case, hollow, place, ledger)
    with output.open("w") as out:
        process = subprocess.Popen([sys.executable, *command], cwd=place, env=environment, stdout=out, stderr=out)
        try:
            return _follow(process, case, output)
        finally:
            process.kill()
            process.wait()


def _environment(case: Case, hollow: Hollow, place: Path, ledger: Path) -> dict[str, str]:
    fixed = {
        **ONE_THREAD,
        "COLUMNS": "160",
        "AUTOFIT_CACHE": str(place / "cache" / _slug(case.name) if case.environment else place / "cache" / "shared"),
        "HOLLOW_CAPACITY": str(CAPACITY_MIB * MIB),
    }
    rest = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**rest, **hollow.environment_with_values(ledger), **fixed, **case.environment}


def _follow(process: subprocess.Popen[bytes], case: Case, output: Path) -> int | None:
    """Waits for the command's end or the time limit; kills its training process if the case says so."""
    deadline, killed = time.monotonic() + LIMIT_SECONDS, not case.kill_at
    while process.poll() is None and time.monotonic() < deadline:
        if not killed and case.kill_at in output.read_text(errors="replace"):
            killed = True
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    if TRAINING in child.cmdline():
                        child.kill()
        time.sleep(0.05)
    return process.poll()


def _missed(case: Case, code: int | None, text: str, losses: Mapping[str, str]) -> Iterator[str]:
    if code is None:
        yield f"not finished after {LIMIT_SECONDS:.0f} s"
    elif code != case.code:
        yield f"exit code {code} instead of {case.code}"
    if "Traceback (most recent call last)" in text and not case.is_script:
        yield "a traceback is printed"
    if case.code == 0 and not case.is_script and not re.search(rf"^finished: {STEPS} steps", text, re.MULTILINE):
        yield f"no {STEPS} steps were trained"
    for pattern in case.shows:
        if not re.search(pattern, text):
            yield f"does not show {pattern!r}"
    if case.same_losses_as:
        own, others = (LOSSES.findall(text) or [""])[-1], losses.get(case.same_losses_as, "")
        if not (own == others if case.kill_at else _are_near(own, others)):
            yield f"loss {own} instead of {others}"


def _are_near(own: str, others: str) -> bool:
    """Returns whether two pairs of losses differ at most as after another order of summation in bfloat16."""
    pairs = [[float(number) for number in text.split(" -> ")] for text in (own, others) if text]
    return len(pairs) == 2 and all(math.isclose(one, other, rel_tol=NEAR) for one, other in zip(*pairs, strict=True))


def _slug(name: str) -> str:
    return re.sub(r"\W+", "-", name).strip("-")
