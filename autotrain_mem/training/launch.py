"""The parent's side of a training run: starts the process, passes on what it tells, and names how it ended."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from autotrain_mem import errors
from autotrain_mem.errors import InterruptedByUser, OutputFolderError, TrainingError
from autotrain_mem.processes import Child, ChildDied

TRAIN_PROCESS = "autotrain_mem.train_process"
LOG_NAME = "train.log"
RUN_NAME = "run.json"

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
    holds = [name for name in (RUN_NAME, "model.safetensors", "adapter_model.safetensors") if (folder / name).exists()]
    holds += [path.name for path in folder.glob("checkpoint-*")]
    if holds and not resuming:
        raise OutputFolderError(
            f"The output folder {output_dir} already holds a run ({', '.join(holds[:3])}).",
            hint="Give another --output_dir, or move that one away. To go on with it, add --resume_from_checkpoint.",
        )
    return folder


def train(
    request: Mapping[str, Any], environment: Mapping[str, str], log: pathlib.Path, on_event: Callable[[Event], None]
) -> Event:
    """Run one training process to its end; returns its ``end`` event.

    Args:
        request: What ``train_process`` reads: job, knobs, hardware, simulate, output_dir.
        log: Where everything goes that the trainer and its libraries print.
        on_event: Told of every event on the way.

    Raises:
        GpuOutOfMemoryError: the card, real or simulated, was full.
        TrainingError: the trainer raised, or its process ended.
        InterruptedByUser: Ctrl-C; the child has ended after its step.
    """
    child = Child(TRAIN_PROCESS, environment, log)
    try:
        child.send(request)
        return _listen(child, log, on_event)
    except KeyboardInterrupt:
        child.interrupt()
        return _listen(child, log, on_event)
    except ChildDied as death:
        raise TrainingError(
            f"The training process ended with status {death.code}.",
            hint=f"Its last words are below; all of them are in {log}.\n{death.log_tail[-800:]}",
        ) from death
    finally:
        child.stop()


def _listen(child: Child, log: pathlib.Path, on_event: Callable[[Event], None]) -> Event:
    for message in child.messages():
        if "error" in message:
            error = errors.from_json(message)
            if isinstance(error, TrainingError):
                error.hint = f"{error.hint}\nAll that the trainer printed is in {log}.".strip()
            raise error
        if message["event"] == "end":
            return message
        on_event(message)
    raise InterruptedByUser("The training process ended before its first step.")
