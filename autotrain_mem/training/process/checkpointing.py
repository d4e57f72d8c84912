"""Writes checkpoints, each with its manifest last, and loads them without running any code in them."""

import errno
import functools
import hashlib
import json
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.checkpoint import CheckpointException, filesystem
from transformers import TrainerCallback
from transformers import trainer as trainer_module

from autotrain_mem.support.errors import OutputFolderError
from autotrain_mem.support.host import free_disk_bytes, free_room
from autotrain_mem.support.units import MIB
from autotrain_mem.training import checkpoints
from autotrain_mem.training.cuda_oom import is_out_of_memory, release
from autotrain_mem.training.process.world import World
from autotrain_mem.training.task import SendEvent

FULL_DISK_BYTES = MIB
"""With less free space than this, a failure of torch's writer means that the disk is full."""
_TORCHS_WRITER = ("PytorchStreamWriter", "inline_container.cc")
"""Texts in the errors of torch's writer, which gives no reason (``caffe2/serialize/inline_container.cc: valid`` says
``file write failed``)."""

_ERRORS = (Exception, CheckpointException)
"""CheckpointException is a BaseException (``torch/distributed/checkpoint/api.py``); every rank raises it."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded", *(f"os error {number}" for number in _FULL))
"""Texts in the messages of safetensors, which writes in Rust (``std::io::Error``'s format)."""
AGAIN = "the device was out of memory"
"""A rank's answer if it lacked device memory to save: releasing the cache may free enough for a retry."""


def is_full_disk(error: BaseException, folder: str) -> bool:
    """Returns whether an error means that the disk, or the user's quota, is full."""
    reason = str(error)
    if getattr(error, "errno", None) in _FULL or any(text in reason for text in _FULL_TEXTS):
        return True
    return any(text in reason for text in _TORCHS_WRITER) and free_disk_bytes(folder) < FULL_DISK_BYTES


def order_of(arguments: Any, rows: Any) -> dict[str, str]:
    """Returns what determines the order of rows: the arguments of the sampling, and a digest of up to 2,047 evenly
    spaced rows. The digest uses only the size of an image, and only the name of a file, without its folder."""
    # ``transformers/trainer.py: _get_train_sampler``, and the same of ``trl/trainer/grpo_trainer.py``
    names = ("seed", "data_seed", "shuffle_dataset", "train_sampling_strategy")
    drawn = {f"--{name}": str(getattr(arguments, name, None)) for name in names}
    if not hasattr(rows, "__len__"):
        return drawn | {"--dataset": "a stream"}
    view, digest = rows.with_format("arrow"), hashlib.blake2b(digest_size=6)
    for index in range(0, len(rows), max(1, len(rows) // 1024)):
        row = json.dumps(
            view[index].to_pylist(), default=lambda value: len(value) if type(value) is bytes else repr(value)
        )
        digest.update(re.sub(r'"/[^"]*/', '"', row).encode())
    return drawn | {"--dataset": f"of {len(rows)} rows ({digest.hexdigest()})"}


def follow_saving(trainer: Any, send: SendEvent, run: str, world: World) -> None:
    """Makes a trainer write checkpoints as :class:`_Saving` does.

    ``saving``, ``checkpoint`` and ``save_failed`` events have the ``step`` and the ``path``. ``save_failed`` has a
    ``message``, and so has ``checkpoint`` if the manifest could not be written. ``run`` goes into each manifest.
    """
    saving = _Saving(trainer, send, run, world)
    trainer.add_callback(saving)
    trainer._save_checkpoint = saving.save_checkpoint
    write_shards(trainer, whole=False)


def _is_sharded(trainer: Any) -> bool:
    return bool(getattr(trainer, "is_fsdp_enabled", False))


def write_shards(trainer: Any, *, whole: bool) -> None:
    """Makes each FSDP rank write its own part of a checkpoint, or rank 0 write all of it.

    For a whole checkpoint, rank 0 gathers weights and optimizer state in its host's memory. A checkpoint in parts can
    be resumed by any number of ranks (``accelerate/utils/fsdp_utils.py: load_fsdp_model``), but holds no whole model.
    """
    if _is_sharded(trainer):
        plugin = trainer.accelerator.state.fsdp_plugin
        plugin.state_dict_config = plugin.optim_state_dict_config = None  # else the configs of the other type stay
        plugin.set_state_dict_type("FULL_STATE_DICT" if whole else "SHARDED_STATE_DICT")


class _Saving(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Writes checkpoints, and removes old ones only when a new one is on disk with its manifest.

    If the disk is full, the unfinished checkpoint is removed, and training continues. Every rank writes its own files.
    When all files of all ranks are on disk, rank 0 writes the manifest and removes old checkpoints.
    """

    def __init__(self, trainer: Any, send: SendEvent, run: str, world: World) -> None:
        self._trainer, self._send, self._run, self._world = trainer, send, run, world
        self._save = trainer._save_checkpoint
        self._limit: int | None = None
        self._best: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes over checkpoint rotation, after trackers have logged the limit: transformers deletes an old checkpoint
        before the new one's manifest exists, and at the end it deletes the newest before the model is saved
        (``trainer.py: _save_checkpoint, _finalize_training``)."""
        self._limit, args.save_total_limit = args.save_total_limit or self._limit, None
        own = Path(args.output_dir) / Path(state.best_model_checkpoint or "").name
        if own.name.startswith("checkpoint-") and own.is_dir():
            state.best_model_checkpoint = str(own)  # the old path of a renamed folder may hold another run
        self._best = _best_of(state)

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        trainer, step = self._trainer, self._trainer.state.global_step
        path = Path(trainer.args.output_dir) / f"checkpoint-{step}"
        place = {"step": step, "path": str(path)}
        self._send({"event": "saving", **place})
        sums: dict[str, int] = {}
        save = functools.partial(self._save, *args, **options)

        def to_disk() -> None:
            if self._world.is_first:
                sums.update(checkpoints.reach_disk(path))

        with self._barriers_that_fail():
            # Ranks gather shards on their devices: if one is out of memory, the others wait in the collective.
            if (failed := self._tried(save, again=not _is_sharded(trainer))) == AGAIN:
                release()
                failed = self._tried(save)
        if failed := failed or self._tried(to_disk):
            if self._world.is_first:
                checkpoints.discard(path)
            vars(trainer.state).update(self._best)  # else the best model would be one that was never written
            self._send({"event": "save_failed", **place, "message": failed})
            return
        self._best = _best_of(trainer.state)
        if not self._world.is_first:
            return
        try:
            checkpoints.write_manifest(path, sums, self._run, getattr(trainer, "autofit_order", {}))
        except OSError as error:
            self._send({"event": "checkpoint", **place, "message": _in_a_line(error)})
            return
        checkpoints.rotate(path.parent, step=step, limit=self._limit, best=trainer.state.best_model_checkpoint)
        self._send({"event": "checkpoint", **place})

    def _tried(self, write: Callable[[], None], *, again: bool = False) -> str:
        """Calls ``write``; returns why a rank failed, :data:`AGAIN` if a retry may help, or an empty text."""
        failed = ""
        try:
            write()
        except _OtherFailed as other:
            return str(other)
        except _ERRORS as error:
            if again and is_out_of_memory(error):
                failed = AGAIN
            elif is_full_disk(error, self._trainer.args.output_dir):
                failed = _in_a_line(error) or type(error).__name__
            else:
                raise
        return self._first_failure(failed)

    def _first_failure(self, failed: str) -> str:
        words = [word for word in self._world.gather(failed) if word]
        return next((word for word in words if word != AGAIN), words[0] if words else "")

    def _barriers_that_fail(self) -> AbstractContextManager[Any]:
        """Within the block, transformers' barrier (``trainer.py: _save_checkpoint``) raises if a rank failed before."""

        def barrier(*args: Any, **options: Any) -> None:
            if failed := self._first_failure(""):
                raise _OtherFailed(failed)

        plain = trainer_module.dist
        stand_in = SimpleNamespace(**{name: getattr(plain, name) for name in dir(plain)} | {"barrier": barrier})
        return patch.object(trainer_module, "dist", stand_in) if self._world.processes > 1 else nullcontext()


class _OtherFailed(Exception):
    """Raised when another rank could not write; every rank has the reason."""


def _best_of(state: Any) -> dict[str, Any]:
    return {name: getattr(state, name) for name in ("best_model_checkpoint", "best_global_step", "best_metric")}


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def save_trained(trainer: Any, output_dir: str) -> None:
    """Writes the final model, and waits until it is on disk. If the disk is full, raises OutputFolderError, whose hint
    names the checkpoint with the trained weights, if there is one."""
    folder, is_sharded = Path(output_dir), _is_sharded(trainer)
    try:
        write_shards(trainer, whole=True)
        for is_last in (is_sharded, True):  # releasing the cache may free enough device memory
            try:
                trainer.save_model(output_dir)
                break
            except Exception as error:
                if is_last or not is_out_of_memory(error):
                    raise
            release()
        checkpoints.sync_all([*(path for path in folder.iterdir() if path.is_file()), folder])
    except Exception as error:
        if not is_full_disk(error, output_dir):
            raise
        message = f"The trained model could not be written to {folder}, {free_room(folder)}: {_in_a_line(error)}"
        newest, step = checkpoints.newest_whole(folder), trainer.state.global_step
        if newest is None:
            hint = "Free some space and run the same command again: it trains from the beginning."
        elif newest.step != step:
            hint = "Free some space and run the same command with --resume_from_checkpoint again: it trains from "
            hint += f"step {newest.step} of {step}."
        else:
            best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
            hint = f"The training is done, and its weights are complete in {best or newest.path}"
            hint += ".\nFree" if is_sharded else ": that folder is the model.\nOr free"  # shards are not a model
            hint += " some space and run the same command with --resume_from_checkpoint, which only writes the model."
        raise OutputFolderError(message, hint=hint) from error


_OF_SHARDS = re.compile(
    r"torch\.(Size|serialization\._get_layout|(b?float|u?int|complex|bool)\d*(_e\dm\d\w*)?)|pathlib\.(_local\.)?PosixPath"
    r"|torch\.distributed\.checkpoint\.(filesystem\._StorageInfo|metadata\.(\w*Metadata|MetadataIndex|StorageMeta"
    r"|TensorProperties|_MEM_FORMAT_ENCODING))"
)
"""The types in the index of shards (``torch/distributed/checkpoint/metadata.py: Metadata`` and its fields)."""


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if _OF_SHARDS.fullmatch(f"{module}.{name}"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


@contextmanager
def without_code(checkpoint: Path) -> Iterator[None]:
    """Within the block, torch loads only tensors, numbers, and those DeepSpeed classes that just store values
    (``runtime/zero/stage_1_and_2.py, stage3.py: state_dict``). A file with anything else raises OutputFolderError.

    By default DeepSpeed (``runtime/checkpoint_engine/torch_checkpoint_engine.py: load``) and the reader of shards
    (``torch/distributed/checkpoint/default_planner.py: load_bytes``, ``filesystem.py: read_metadata``) load anything.
    """
    classes: list[Any] = []
    if checkpoints.is_deepspeeds(checkpoint) or "deepspeed" in sys.modules:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        classes = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    last: Any = checkpoint

    def named(load: Callable[..., Any], **always: Any) -> Callable[..., Any]:
        def loads(file: Any, *args: Any, **options: Any) -> Any:
            nonlocal last
            last = file if isinstance(file, str | Path) else getattr(file, "name", checkpoint)
            return load(file, *args, **options | always)

        return loads

    index = SimpleNamespace(**vars(pickle) | {"load": named(lambda file: _Index(file).load())})
    tensors = patch.object(torch, "load", named(torch.load, weights_only=True))
    try:
        with torch.serialization.safe_globals(classes), tensors, patch.object(filesystem, "pickle", index):
            yield
    except (pickle.UnpicklingError, CheckpointException) as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        if asked is None and isinstance(error, CheckpointException):
            raise
        what = f"{asked[1]}, which does not belong in a checkpoint" if asked else "more than tensors"
        message = f"{last} was not loaded: it contains {what} and could run code."
        raise OutputFolderError(message, hint=checkpoints.instead_of(checkpoint)) from error


_TRACKERS = "transformers.integrations."
"""The package of the callbacks that ``report_to`` selects."""


def drop_logs_without_room(trainer: Any, send: SendEvent) -> None:
    """Drops the logs of a trainer (``trl/trainer/grpo_trainer.py: log`` writes completions) and of its trackers when
    the disk is full; a ``note`` reports this once for each."""
    notes: list[str] = []

    def lossy(method: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                if not is_full_disk(error, trainer.args.output_dir):
                    raise
                if what not in notes:
                    notes.append(what)
                    reason = f"could not be written, training continues: {_in_a_line(error)}"
                    send({"event": "note", "message": f"{what} {reason}"})
                return None

        return run

    trainer.log = lossy(trainer.log, "what the trainer logs")
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        if kind.__module__.startswith(_TRACKERS):
            for name in [name for name in dir(kind) if name.startswith("on_")]:
                setattr(callback, name, lossy(getattr(callback, name), f"what {kind.__name__} logs"))
