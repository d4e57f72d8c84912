"""The parent's side of a training run: starts the process, passes on what it tells, and names how it ended."""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Callable, Mapping
from typing import Any

from autotrain_mem import errors
from autotrain_mem.errors import InterruptedByUser, OutputFolderError, RewardFunctionError, TrainingError
from autotrain_mem.processes import Child, ChildDied
from autotrain_mem.spec.report import RUN_NAME
from autotrain_mem.training.request import Request

RUN_PROCESS = "autotrain_mem.run.process"
LOG_NAME = "train.log"

LAST_WORDS_SECONDS = 60.0
"""How long a run that is done may take to end by itself: trackers send what they hold when the interpreter exits."""

LAST_WORDS_CHARACTERS = 800
"""How much of a dead process's log an error shows."""

Event = dict[str, Any]


def prepare_folder(output_dir: str, *, resuming: bool) -> pathlib.Path:
    """Make the output folder, and make sure that it can be written and holds no other run.

    Args:
        resuming: The run in the folder is the one to go on with.

    Raises:
        OutputFolderError: it cannot be made or written, or a run is in it already.
    """
    folder = pathlib.Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".autofit-probe"
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    except OSError as error:
        raise OutputFolderError(
            f"Cannot write to the output folder {output_dir}: {error.strerror}.",
            hint="Give --output_dir a folder that you may write to, on a disk with room for the model.",
        ) from error
    if not resuming:
        _check_holds_no_run(folder)
    return folder


def check_folder(output_dir: str, *, resuming: bool) -> None:
    """What :func:`prepare_folder` would refuse, as far as it can be told without making anything.

    Raises:
        OutputFolderError: the nearest folder that exists cannot be written, or a run is in it already.
    """
    folder = pathlib.Path(output_dir).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = "may not be written to" if nearest.is_dir() else "is a file"
        raise OutputFolderError(
            f"Cannot write to the output folder {output_dir}: {nearest} {reason}.",
            hint="Give --output_dir a folder that you may write to, on a disk with room for the model.",
        )
    if not resuming:
        _check_holds_no_run(pathlib.Path(output_dir))


def _check_holds_no_run(folder: pathlib.Path) -> None:
    names = (RUN_NAME, "model.safetensors", "adapter_model.safetensors")
    files = [name for name in names if (folder / name).exists()]
    checkpoints = sorted(path.name for path in folder.glob("checkpoint-*"))
    if files or checkpoints:
        go_on = " To go on with it, add --resume_from_checkpoint true." if checkpoints else ""
        raise OutputFolderError(
            f"The output folder {folder} already holds a run ({', '.join((files + checkpoints)[:3])}).",
            hint=f"Give another --output_dir, or move that one away.{go_on}",
        )


def train(
    request: Request, environment: Mapping[str, str], log: pathlib.Path, on_event: Callable[[Event], None]
) -> Event:
    """Run one training process to its end; returns its ``end`` event.

    Args:
        log: Where everything goes that the trainer and its libraries print.
        on_event: Told of every event on the way.

    Raises:
        GpuOutOfMemoryError: the card, real or simulated, was full.
        TrainingError: the trainer raised, or its process ended.
        InterruptedByUser: Ctrl-C before the first step, or twice. After a single one the child ends after its step,
            and so does this function.
    """
    child = Child(RUN_PROCESS, environment, log)
    try:
        child.send(request.to_json())
        return _listen(child, log, on_event)
    except KeyboardInterrupt:
        return _end_after_step(child, log, on_event)
    except ChildDied as death:
        raise _ended(death, log) from death
    finally:
        child.stop()


def _listen(child: Child, log: pathlib.Path, on_event: Callable[[Event], None]) -> Event:
    for message in child.messages():
        if "error" in message:
            error = errors.from_json(message)
            if isinstance(error, (TrainingError, RewardFunctionError)):
                error.hint = f"{error.hint}\nAll that the trainer printed is in {log}.".strip()
            raise error
        if message["event"] == "end":
            child.wait(LAST_WORDS_SECONDS)
            return message
        on_event(message)
    raise InterruptedByUser("The training process ended before its first step.", hint=f"What it printed is in {log}.")


def _end_after_step(child: Child, log: pathlib.Path, on_event: Callable[[Event], None]) -> Event:
    """Ctrl-C: let the child end its step and write what it must. A second Ctrl-C does not wait."""
    try:
        on_event({"event": "interrupted"})
        child.interrupt()
        return _listen(child, log, on_event)
    except ChildDied as death:  # before training it has no step to end
        raise InterruptedByUser(
            "Interrupted before training began; no step was trained.", hint="Run the command again when you like."
        ) from death
    except KeyboardInterrupt as again:
        child.kill()
        raise InterruptedByUser(
            "Interrupted twice, in the middle of a step.",
            hint="Checkpoints that were complete before stay valid; the newest may not be.",
        ) from again


def _ended(death: ChildDied, log: pathlib.Path) -> TrainingError:
    status = f"exit status {death.code}"
    if death.code is not None and death.code < 0:
        status = f"it was killed by signal {-death.code}"
    often = "Signal 9 is often the host running out of memory.\n" if death.code == -signal.SIGKILL else ""
    words = death.log_tail[-LAST_WORDS_CHARACTERS:].strip()
    said = f"Its last words are below; all of them are in {log}.\n{words}" if words else f"Its log, {log}, is empty."
    return TrainingError(f"The training process ended before its time: {status}.", hint=often + said)
