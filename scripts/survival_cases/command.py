"""Runs the command as a user would type it, in its own process, and reads its results."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench import ONE_THREAD, ROOT

AUTOFIT = "autotrain_mem.cli.main"
UNCLEAN = ("Traceback", "Unforeseen:", "The trainer raised ")
LIMIT_SECONDS = 300.0
"""The time limit of one command; one that hangs counts as failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    code: int | None
    """The exit code; None if the command had to be killed."""
    seconds: float
    told: Mapping[str, Any] | None
    """The JSON object that it printed; None if it printed none."""
    error: str
    """Its error with the hint; empty if there was none."""
    folder: pathlib.Path
    first_step_seconds: float | None
    """Seconds from the start to the end of the first optimizer step, including planning; None if not measured."""

    @property
    def finished(self) -> bool:
        return self.code == 0 and self.told is not None

    @property
    def is_reported(self) -> bool:
        """Whether it failed with an expected error of autofit's, without a traceback."""
        return bool(self.code) and self.error.startswith("error:") and not any(each in self.error for each in UNCLEAN)

    @property
    def experience(self) -> Mapping[str, Any]:
        """What the run measured and survived: from the printed plan, or else from ``plan.json`` in its folder."""
        plan: Mapping[str, Any] = {}
        if self.told is not None:
            plan = self.told["plan"]
        elif (self.folder / "plan.json").is_file():
            plan = json.loads((self.folder / "plan.json").read_text())
        return plan.get("experience") or {}

    def count(self, name: str) -> int:
        """Returns the number of ``incidents``, ``restarts`` or ``probes``."""
        return len(self.experience.get(name, ()))

    def state(self) -> Mapping[str, Any]:
        """Returns ``trainer_state.json`` of the newest checkpoint; empty if there is no checkpoint."""
        numbered = {
            int(match[1]): path
            for path in self.folder.glob("checkpoint-*/trainer_state.json")
            if (match := re.fullmatch(r"checkpoint-(\d+)", path.parent.name))
        }
        return json.loads(numbered[max(numbered)].read_text()) if numbered else {}

    def losses(self) -> dict[int, float]:
        """Returns the logged losses by optimizer step."""
        return {entry["step"]: float(entry["loss"]) for entry in self.state().get("log_history", ()) if "loss" in entry}


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    process: subprocess.Popen[bytes]
    lines: pathlib.Path
    """The file with its stderr, which has a line for each step."""
    deadline: float
    """When its time limit ends (``time.monotonic``)."""

    def reaches(self, step: int) -> bool:
        """Waits until the command has printed a step; returns False if it exits first or takes too long."""
        while self.process.poll() is None and time.monotonic() < self.deadline:
            if f"\nstep {step}/" in self.lines.read_text(errors="replace"):
                return True
            time.sleep(0.02)
        return False


def autofit(
    argv: Sequence[str],
    place: pathlib.Path,
    run: str,
    environment: Mapping[str, str | None],
    *,
    folder: pathlib.Path | None = None,
    meanwhile: Callable[[Running], None] | None = None,
    module: str = AUTOFIT,
    on: Sequence[str] = (),
    limit_seconds: float = LIMIT_SECONDS,
) -> Ended:
    """Runs one command in ``place``.

    Args:
        on: A prefix of the command that runs it on another machine (``survival_cases/nodes.py``).
        folder: Its output folder, which is left as it is; None for ``runs/RUN`` in ``place``, which is emptied first.
        meanwhile: Is called after the start; the time of the first step is then not measured.
        module: The Python module to run.
    """
    if folder is None:
        folder = place / "runs" / run
        shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    said, cried = folder.parent / f"{run}.json", folder.parent / f"{run}.txt"
    code: int | None
    started, first_step_seconds = time.monotonic(), None
    with said.open("w") as out, cried.open("w") as err:
        command = [*on, sys.executable, "-m", module, *argv, "--output_dir", str(folder), "--json"]
        process = subprocess.Popen(command, cwd=place, stdout=out, stderr=err, env=surroundings(place, environment))
        running = Running(process=process, lines=cried, deadline=started + limit_seconds)
        if meanwhile is not None:
            meanwhile(running)
        elif running.reaches(1):
            first_step_seconds = round(time.monotonic() - started, 2)
        try:
            code = process.wait(max(0.0, running.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
            process.kill()  # its children then exit, because their stdin closes
            process.wait()
    printed, errors = said.read_text(), cried.read_text()
    return Ended(
        code=code,
        seconds=time.monotonic() - started,
        told=json.loads(printed) if printed.strip() else None,
        error=errors[errors.find("\nerror:") + 1 :] if "error:" in errors else "",
        folder=folder,
        first_step_seconds=first_step_seconds,
    )


def surroundings(place: pathlib.Path, more: Mapping[str, str | None]) -> dict[str, str]:
    """Returns the environment of a command: one thread, no network, a cache beside the runs, and ``more``, in which
    None removes a variable."""
    fixed = {
        "CUDA_VISIBLE_DEVICES": "",
        "AUTOFIT_CACHE": str(place / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH")))),
    }
    every = {**os.environ, **ONE_THREAD, **fixed, **more}
    return {name: value for name, value in every.items() if value is not None}


@contextmanager
def forge() -> Iterator[None]:
    """Inside, commands and workers are forked from a process that has imported everything (``tests/forked.py``)."""
    from tests.forked import Forge

    with tempfile.TemporaryDirectory() as folder:
        running = Forge(pathlib.Path(folder))
        running.connect().close()  # start it before several threads use it
        try:
            with running.commands(sys.modules[__name__]):
                yield
        finally:
            running.end()
