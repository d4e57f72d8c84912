"""Writes checkpoints so that each ends with its manifest, and a full disk costs a checkpoint, not the run."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from autotrain_mem.errors import OutputFolderError
from autotrain_mem.training.checkpoints import discard, newest_whole, reach_disk, rotate, sync_all, write_manifest
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
    """Have a trainer write checkpoints as :class:`_Saving` does.

    ``saving`` and ``checkpoint`` events have the ``step`` and the ``path``, ``save_failed`` the ``message`` as well;
    and ``checkpoint`` has one where the manifest could not be written.

    Args:
        run: The id of the run, which goes into each manifest.
    """
    saving = _Saving(trainer, send, run)
    trainer.add_callback(saving)
    trainer._save_checkpoint = saving.save_checkpoint


class _Saving(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Writes checkpoints, and removes old ones only when a new one is on the disk with its manifest.

    A full disk costs a checkpoint: what was written of it is removed, and the next one is tried as if nothing had been.
    One that lacks nothing but its manifest stays, and so do all that are older.
    """

    def __init__(self, trainer: Any, send: SendEvent, run: str) -> None:
        self._trainer, self._send, self._run = trainer, send, run
        self._save = trainer._save_checkpoint
        self._limit: int | None = None
        self._best: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take rotation over, once trackers have written the limit down: transformers deletes an old checkpoint before
        the new one's manifest is there, and at the end the newest, before the model is saved
        (``trainer.py: _save_checkpoint, _finalize_training``)."""
        self._limit, args.save_total_limit = args.save_total_limit or self._limit, None
        own = Path(args.output_dir) / Path(state.best_model_checkpoint or "").name
        if own.name.startswith("checkpoint-") and own.is_dir():
            state.best_model_checkpoint = str(own)  # a folder that was renamed may have another run in its old place
        self._best = _best_of(state)

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        trainer, step = self._trainer, self._trainer.state.global_step
        path = Path(trainer.args.output_dir) / f"checkpoint-{step}"
        place = {"step": step, "path": str(path)}
        self._send({"event": "saving", **place})
        try:
            _twice_if_full(lambda: self._save(*args, **options))
            sums = reach_disk(path)
        except Exception as error:
            if not is_full_disk(error, trainer.args.output_dir):
                raise
            discard(path)
            vars(trainer.state).update(self._best)  # else a model that is nowhere would stay the best
            self._send({"event": "save_failed", **place, "message": _in_a_line(error)})
            return
        self._best = _best_of(trainer.state)
        try:
            write_manifest(path, sums, self._run)
        except OSError as error:
            self._send({"event": "checkpoint", **place, "message": _in_a_line(error)})
            return
        rotate(path.parent, step=step, limit=self._limit, best=trainer.state.best_model_checkpoint)
        self._send({"event": "checkpoint", **place})


def _best_of(state: Any) -> dict[str, Any]:
    return {name: getattr(state, name) for name in ("best_model_checkpoint", "best_global_step", "best_metric")}


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())


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
    """Write the model as it is at the end, and wait until it is on the disk.

    Raises:
        OutputFolderError: the disk is full; the error says where the trained weights are, if anywhere.
    """
    folder = Path(output_dir)
    try:
        _twice_if_full(lambda: trainer.save_model(output_dir))
        sync_all([*(path for path in folder.iterdir() if path.is_file()), folder])
    except Exception as error:
        if not is_full_disk(error, output_dir):
            raise
        best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
        raise _unsaved(folder, trainer.state.global_step, best, error) from error


def _unsaved(folder: Path, step: int, best: str | None, error: Exception) -> OutputFolderError:
    free = format_bytes(shutil.disk_usage(folder).free)
    reason = _in_a_line(error)
    message = f"The trained model could not be written to {folder}, whose disk has {free} free: {reason}"
    newest = newest_whole(folder)
    if newest is not None and newest.step == step:
        model = best or newest.path
        return OutputFolderError(
            message,
            hint=f"The training is done, and its weights are whole in {model}: that folder is the model.\n"
            "Or free some space and run the same command with --resume_from_checkpoint, which only writes the model.",
        )
    where = "from the beginning" if newest is None else f"from step {newest.step} of {step}"
    return OutputFolderError(
        message,
        hint=f"Free some space and run the same command {'' if newest is None else 'with --resume_from_checkpoint '}"
        f"again: it trains {where}.",
    )
