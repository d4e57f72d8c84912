"""Runs one case and keeps what came of it.

Commands that train nothing run in this process, with one warm worker for all of them; every trace that it answers with
is kept as digests. Trainings are commands in processes of their own.
"""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from real_allocator import simulated
from survival_cases.command import autofit

from autotrain_mem.cli import main
from autotrain_mem.estimator.depth.alignment import in_order
from autotrain_mem.machine.fault_injection import MARKS_NAME, VARIABLE
from autotrain_mem.types import Trace
from autotrain_mem.worker.client import Worker
from autotrain_mem.worker.pool import Workers
from oracle_cases.digest import columns, digest, file_digest, settled

Result = dict[str, Any]

_traces: list[Result] = []
"""Of the rehearsals since the case began."""


@contextlib.contextmanager
def warm(place: pathlib.Path) -> Iterator[None]:
    """Commands run in ``place`` meanwhile, share one worker, and the traces that it answers with are kept."""
    rehearse = Worker.rehearse

    def kept(worker: Worker, *args: Any, **options: Any) -> Trace:
        trace = rehearse(worker, *args, **options)
        _traces.append(columns(replace(trace, events=in_order(trace))))
        return trace

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(place))
        shared = stack.enter_context(Workers(1))
        stack.enter_context(patch.object(Worker, "rehearse", kept))
        stack.enter_context(patch.object(Workers, "__init__", lambda *_, **__: None))
        stack.enter_context(patch.object(Workers, "__enter__", lambda _: shared))
        stack.enter_context(patch.object(Workers, "__exit__", lambda *_: None))
        yield


def printed(line: str, *, models: pathlib.Path | None = None) -> Result:
    """Returns the exit code of a command line, the JSON that it prints, and the traces that it asked for.

    Args:
        models: The folder of the models that it names; None for that of the tiny ones.
    """
    _traces.clear()
    place = models or pathlib.Path.cwd()
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main.run([*line.split(), "--json"])
    error = errors.getvalue()
    result = {"json": json.loads(output.getvalue())} if code == 0 else {"error": error[error.find("error:") :]}
    kept: Result = settled({"command": line, "exit_code": code, **result, "traces": list(_traces)}, place)
    return kept


def followed(line: str, more: str) -> Result:
    """Returns the same of a plan that is written to a file and then followed with other flags."""
    printed(f"{line} --out followed.json")
    return printed(f"plan {line.split()[1]} --plan followed.json {more}")


def replayed(path: pathlib.Path) -> Result:
    """Returns a digest of what the simulated allocator answers to recorded events, and its numbers at the end."""
    recording = json.loads(path.read_text(encoding="utf-8"))
    events = [event for event, _, _ in recording["answers"]]
    answers = list(simulated(recording["settings"], recording["capacity_bytes"], recording["total_bytes"], events))
    return {"answers": digest(answers), "at_the_end": answers[-1]["numbers"]}


def trained(line: str, fault: str) -> Result:
    """Returns the losses and digests of the final weights of a run with a fault, and what the run says of itself."""
    place = pathlib.Path.cwd()
    name = re.sub(r"\W+", "-", f"{line.split()[0]} {fault}")
    ended = autofit(line.split(), place, name, {VARIABLE: fault})
    marks = ended.folder / MARKS_NAME
    result: Result = {
        "command": line,
        "exit_code": ended.code,
        "error": ended.error,
        "json": ended.told,
        "losses": ended.losses(),
        "weights": {path.name: file_digest(path) for path in sorted(ended.folder.glob("*.safetensors"))},
        "faults": marks.read_text().splitlines() if marks.is_file() else [],
    }
    kept: Result = settled(result, place)
    return kept
