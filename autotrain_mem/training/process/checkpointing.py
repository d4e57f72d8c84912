"""Writes checkpoints so that each ends with its manifest, and a full disk costs a checkpoint, not the run."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotrain_mem.errors import OutputFolderError
from autotrain_mem.training.checkpoints import discard, newest_whole, write_manifest
from autotrain_mem.training.out_of_memory import is_out_of_memory, release
from autotrain_mem.training.request import SendEvent
from autotrain_mem.units import MIB, format_bytes

FULL_DISK_BYTES = MIB
"""Less than this free, and it was the disk, whatever the library says: torch tells no reason (``caffe2/serialize/
inline_container.cc: PyTorchStreamWriter::valid`` says ``file write failed``)."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded", *(f"os error {number}" for number in _FULL))
"""What safetensors, whose writer is Rust, has in its message (``std::io::Error``'s form)."""


def is_full_disk(error: BaseException, folder: str) -> bool:
    """Whether it was the disk, or the user's part of it, that had no room."""
    if getattr(error, "errno", None) in _FULL or any(text in str(error) for text in _FULL_TEXTS):
        return True
    return shutil.disk_usage(folder).free < FULL_DISK_BYTES


def follow_saving(trainer: Any, send: SendEvent, run: str = "") -> None:
    """Have a trainer send an event for every checkpoint, and train on where the disk had no room for one.

    ``saving`` and ``checkpoint`` events have the ``step`` and the ``path``, ``save_failed`` the ``message`` as well.
    What was written of one that failed is removed, and the next one is tried as if nothing had been.

    Args:
        run: The id of the run, which goes into each manifest.
    """
    save = trainer._save_checkpoint

    def save_checkpoint(*args: Any, **options: Any) -> None:
        step, best = trainer.state.global_step, trainer.state.best_model_checkpoint
        path = Path(trainer.args.output_dir) / f"checkpoint-{step}"
        place = {"step": step, "path": str(path)}
        send({"event": "saving", **place})
        try:
            _twice_if_full(lambda: save(*args, **options))
            write_manifest(path, run)
        except Exception as error:
            if not is_full_disk(error, trainer.args.output_dir):
                raise
            discard(path)
            trainer.state.best_model_checkpoint = best
            send({"event": "save_failed", **place, "message": " ".join(str(error).split())})
        else:
            send({"event": "checkpoint", **place})

    trainer._save_checkpoint = save_checkpoint


def _twice_if_full(save: Callable[[], None]) -> None:
    """A device that is full as weights are gathered has room once the cache is given back; the files are made anew."""
    try:
        save()
        return
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    release()
    save()


def save_trained(trainer: Any, output_dir: str) -> None:
    """The model as it is at the end.

    Raises:
        OutputFolderError: the disk is full; the error says where the trained weights are, if anywhere.
    """
    try:
        _twice_if_full(lambda: trainer.save_model(output_dir))
    except Exception as error:
        if not is_full_disk(error, output_dir):
            raise
        raise _unsaved(Path(output_dir), trainer.state.global_step, error) from error


def _unsaved(folder: Path, step: int, error: Exception) -> OutputFolderError:
    free = format_bytes(shutil.disk_usage(folder).free)
    reason = " ".join(str(error).split())
    message = f"The trained model could not be written to {folder}, whose disk has {free} free: {reason}"
    newest = newest_whole(folder)
    if newest is not None and newest.step == step:
        return OutputFolderError(
            message,
            hint=f"The training is done, and its weights are whole in {newest.path}: that folder is the model.\n"
            "Or free some space and run the same command with --resume_from_checkpoint, which only writes the model.",
        )
    where = "from the beginning" if newest is None else f"from step {newest.step} of {step}"
    return OutputFolderError(
        message,
        hint=f"Free some space and run the same command {'' if newest is None else 'with --resume_from_checkpoint '}"
        f"again: it trains {where}.",
    )
