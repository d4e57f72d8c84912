"""The parent's side of a probe: starts its process, waits for the one answer, and leaves nothing of it behind."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autotrain_mem import errors
from autotrain_mem.errors import InterruptedByUser, OutputFolderError, RewardFunctionError, TrainingError
from autotrain_mem.processes import Child, ChildDied
from autotrain_mem.spec.experience import Probe
from autotrain_mem.training.launch import LAST_WORDS_CHARACTERS, RUN_PROCESS
from autotrain_mem.training.out_of_memory import HOST, kind_of_text
from autotrain_mem.training.request import Request

LOG_NAME = "probe.log"
SCRATCH_NAME = ".probe"
"""Of the folder that a probe saves to, within the run's: the training will save to the same disk."""


def run_probe(
    request: Request, environment: Mapping[str, str], folder: pathlib.Path, module: str = RUN_PROCESS
) -> Probe:
    """Try settings in a process of its own; ``seconds`` of what comes back are of all of it.

    Args:
        folder: The output folder, which exists; ``probe.log`` in it gets all that the trainer prints.

    Raises:
        OutputFolderError: the disk is full, or cannot be written.
        TrainingError, RewardFunctionError, DatasetError, ModelError: what the training would have met as well.
        InterruptedByUser: Ctrl-C.
    """
    started = time.monotonic()
    log = folder / LOG_NAME
    with _scratch(folder) as scratch:
        child = Child(module, environment, log, has_children=True)
        try:
            child.send(replace(request, output_dir=str(scratch)).to_json())
            probe = _answer(child, log)
        except KeyboardInterrupt as interrupt:
            raise InterruptedByUser(
                "Interrupted before training began; no step was trained.", hint="Run the command again when you like."
            ) from interrupt
        except ChildDied as death:
            probe = _of_death(request, death, log)
        finally:
            child.kill()  # it has told all that it had to tell, and its card is wanted
            child.stop()
    return replace(probe, seconds=time.monotonic() - started)


def _answer(child: Child, log: pathlib.Path) -> Probe:
    while True:
        message: dict[str, Any] = child.receive()
        if "error" in message:
            error = errors.from_json(message)
            if isinstance(error, (TrainingError, RewardFunctionError)):
                error.hint = f"{error.hint}\nAll that the trainer printed is in {log}.".strip()
            raise error
        if message["event"] == "probe":
            return Probe.from_json(message["probe"])


def _of_death(request: Request, death: ChildDied, log: pathlib.Path) -> Probe:
    """Where the device was full and a library ended the process for it, that is an answer. Raises TrainingError."""
    lines = [line for line in death.log_tail.splitlines() if kind_of_text(line) not in (None, HOST)]
    if lines:
        return Probe(knobs=request.knobs, fits=False, measured=None, phases={}, refused=lines[-1].strip())
    killed = death.code is not None and death.code < 0
    status = f"it was killed by signal {-death.code}" if killed and death.code else f"exit status {death.code}"
    often = "Signal 9 is often the host running out of memory.\n" if death.code == -signal.SIGKILL else ""
    raise TrainingError(
        f"The probe before the training ended before its time: {status}.",
        hint=f"{often}Its last words are below; all of them are in {log}. --no_probe trains without a probe.\n"
        f"{death.log_tail[-LAST_WORDS_CHARACTERS:].strip()}",
    ) from death


@contextlib.contextmanager
def _scratch(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty folder that goes when the probe has ended, however it ended; one of a parent that was killed goes too.

    Raises:
        OutputFolderError: it cannot be made.
    """
    scratch = folder / SCRATCH_NAME
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir()
        yield scratch
    except OSError as error:
        raise OutputFolderError(
            f"Cannot write to the output folder {folder}: {error.strerror}.",
            hint="Give --output_dir a folder that you may write to, on a disk with room for the model.",
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
