"""Runs one case and returns its results.

Commands that do not train run in this process and share one worker; every trace from it is kept as digests. Commands
that train run in separate processes.
"""

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
"""The digests of the traces rehearsed since the case began."""


@contextlib.contextmanager
def warm(place: pathlib.Path) -> Iterator[None]:
    """Inside, commands run in ``place`` and share one worker, whose traces are kept."""
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
    """Returns the exit code of a command line, the JSON that it prints, and the traces that it rehearsed. ``models``:
    the folder of the models in the command line; None for the tiny models."""
    _traces.clear()
    place = models or pathlib.Path.cwd()
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main.run([*line.split(), "--json"])
    error = errors.getvalue()
    result = {"json": json.loads(text)} if (text := output.getvalue()) else {"error": error[error.find("error:") :]}
    kept: Result = settled({"command": line, "exit_code": code, **result, "traces": list(_traces)}, place)
    return kept


def followed(line: str, more: str) -> Result:
    """Returns the same for a plan that is written to a file and then followed with further flags."""
    printed(f"{line} --out followed.json")
    return printed(f"plan {line.split()[1]} --plan followed.json {more}")


def replayed(path: pathlib.Path) -> Result:
    """Returns a digest of the simulated allocator's answers to recorded events, and its final statistics."""
    recording = json.loads(path.read_text(encoding="utf-8"))
    events = [event for event, _, _ in recording["answers"]]
    answers = list(simulated(recording["settings"], recording["capacity_bytes"], recording["total_bytes"], events))
    return {"answers": digest(answers), "at_the_end": answers[-1]["numbers"]}


def trained(line: str, fault: str) -> Result:
    """Returns the losses, digests of the final weights, and the printed JSON of a run with a fault."""
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
