"""Runs one request in a process of its own (``python -m autotrain_mem.training.process.main``), answers and exits."""

from __future__ import annotations

import contextlib
import errno
import signal
import traceback
from typing import TYPE_CHECKING

from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError, OutputFolderError, TrainingError, described
from autotrain_mem.support.host import free_room
from autotrain_mem.support.processes import Channel
from autotrain_mem.training.task import Request, interrupted_before_training

if TYPE_CHECKING:
    from autotrain_mem.training.process.build import DeviceOf

_UNWRITABLE = (errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


def main(device_of: DeviceOf | None = None) -> None:
    """Runs one task, and sends its last event or an error. ``device_of``: the device to run on; None for a real
    device."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `autofit ... &` ignores SIGINT

    def on_loss(error: OSError) -> None:
        message = f"the log cannot be written ({error.strerror}): training continues without it"
        channel.send({"event": "note", "message": message})

    channel = Channel(ignore_interrupt=False, on_loss=on_loss)
    request = codec.from_json(Request, channel.receive())
    try:
        # The imports take seconds; interrupts and the parent's exit are already handled.
        from autotrain_mem.training.process.probe import probe
        from autotrain_mem.training.process.train import train
        from autotrain_mem.training.process.world import beating, find_other_machines

        tasks = {"probe": probe, "train": train}
        if request.processes_here < request.knobs.processes:
            find_other_machines()
        with beating(channel.send):
            channel.send(tasks[request.task](request, channel.send, *(() if device_of is None else (device_of,))))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes twice: from the terminal and from the parent
        channel.send(interrupted_before_training().to_json())
    except SystemExit:
        raise
    except BaseException as error:  # the user sees any exception as one line; the log has its traceback
        with contextlib.suppress(OSError):  # the disk of the log may be full
            traceback.print_exc()  # first: the parent kills this process once it has the error
        channel.send(_failure(error, request.output_dir).to_json())


def _failure(error: BaseException, output_dir: str) -> AutofitError:
    """Converts an exception of the libraries into an error that the user understands."""
    if isinstance(error, AutofitError):
        return error
    from autotrain_mem.training.process.checkpointing import is_full_disk

    reason = " ".join(str(error).split())
    if is_full_disk(error, output_dir) or getattr(error, "errno", None) in _UNWRITABLE:
        return OutputFolderError(
            f"The run could not be written to {output_dir}, {free_room(output_dir)}: {reason}",
            hint="Remove some files, or give --output_dir a folder on another disk. The last file written there may be "
            "incomplete; older checkpoints are complete.",
        )
    return TrainingError(
        f"The trainer raised {described(error)}", hint="If the message names a flag, change that flag."
    )


if __name__ == "__main__":
    main()
