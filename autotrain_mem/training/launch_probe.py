"""Starts a probe's process from the parent, waits for the one answer, and leaves nothing of it behind."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autotrain_mem.processes import Child, ChildDied
from autotrain_mem.spec import codec
from autotrain_mem.spec.experience import Probe
from autotrain_mem.training.launch import RUN_PROCESS, died_early, error_of, unwritable
from autotrain_mem.training.out_of_memory import HOST, kind_of_text
from autotrain_mem.training.request import Request, interrupted_before_training

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
            child.send(codec.to_json(replace(request, output_dir=str(scratch))))
            probe = _answer(child, log)
        except KeyboardInterrupt as interrupt:
            raise interrupted_before_training() from interrupt
        except ChildDied as death:
            probe = _probe_of_death(request, death, log)
        finally:
            child.kill()  # it has told all that it had to tell, and its card is wanted
            child.stop()
    return replace(probe, seconds=round(time.monotonic() - started, 3))


def _answer(child: Child, log: pathlib.Path) -> Probe:
    while True:
        message: dict[str, Any] = child.receive()
        if "error" in message:
            raise error_of(message, log)
        if message["event"] == "probe":
            return codec.from_json(Probe, message["probe"])


def _probe_of_death(request: Request, death: ChildDied, log: pathlib.Path) -> Probe:
    """Answer that the settings do not fit, where a library ended the process since the device was full.

    Raises:
        TrainingError: it ended otherwise.
    """
    lines = [line for line in death.log_tail.splitlines() if kind_of_text(line) not in (None, HOST)]
    if lines:
        return Probe(knobs=request.knobs, fits=False, measured=None, phases={}, refused=lines[-1].strip())
    advice = " --no_probe trains without a probe."
    raise died_early("The probe before the training", death, log, advice) from death


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
        raise unwritable(folder, str(error.strerror)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
