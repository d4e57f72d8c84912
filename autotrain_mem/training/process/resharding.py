"""Resumes under FSDP2 from a checkpoint that one process or DDP wrote, and vice versa.

``torch.distributed.checkpoint`` reads both forms tensor by tensor, except ``optimizer.pt``."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils.constants import FSDP_MODEL_NAME
from peft import PeftModel, get_peft_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.trainer import OPTIMIZER_NAME

from autotrain_mem.support.errors import OutputFolderError, TrainingError, described
from autotrain_mem.training.checkpoint_kinds import Resumer, check_form, form_of, is_of_another_form
from autotrain_mem.training.checkpoints import instead_of
from autotrain_mem.training.task import SendEvent
from autotrain_mem.types import Knobs

OTHER_MODEL = "Resume with the model, the LoRA settings and the optimizer of the first run."
_HOW_IT_STEPS = ("foreach", "fused", "capturable", "differentiable")
"""Options for how, not what, an optimizer computes (``torch/optim/adamw.py``). The checkpoint's values are ignored."""


def read_other_forms(trainer: Any, checkpoint: str | None, knobs: Knobs, send: SendEvent) -> None:
    """Makes a trainer resume from a checkpoint of another sharding. Raises OutputFolderError if that is impossible."""
    if not checkpoint or not is_of_another_form(Path(checkpoint), Resumer.of(knobs)):
        return
    check_form(Path(checkpoint), Resumer.of(knobs))

    def load(folder: str | None) -> None:
        model, optimizer = trainer.model, getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        is_in_shards = form_of(Path(checkpoint)) == "shards"
        if rounding := _load_weights(model, Path(checkpoint), is_in_shards=is_in_shards):
            send({"event": "note", "message": rounding})
        state = get_optimizer_state_dict(model, optimizer)  # by names; an optimizer without state creates it first
        groups = state["param_groups"]
        computes = [{name: group.pop(name) for name in _HOW_IT_STEPS if name in group} for group in groups]
        fill = _fill_from_shards if is_in_shards else _fill_from_file
        fill(state, Path(checkpoint))
        for group, options in zip(groups, computes, strict=True):
            group.update(options)
        optimizer.load_state_dict(state)
        schedule = torch.load(Path(str(folder)) / "scheduler.pt", map_location="cpu", weights_only=True)
        trainer.lr_scheduler.load_state_dict(schedule)

    trainer._load_from_checkpoint = lambda *_, **__: None
    trainer._load_optimizer_and_scheduler = load


def _load_weights(model: Any, checkpoint: Path, *, is_in_shards: bool) -> str:
    """Loads the weights in place; returns a note if they are rounded, or an empty text."""
    tensors: Mapping[str, torch.Tensor] = model.state_dict(keep_vars=True)
    if isinstance(model, PeftModel):
        if len(model.peft_config) > 1:
            raise TrainingError(
                f"The model has {len(model.peft_config)} adapters, and resharding supports only one.",
                hint="Resume with the --sharding and --gpus of the first run.",
            )
        parameters = dict(model.named_parameters(remove_duplicate=False))  # PEFT writes them without the adapter's name
        tensors = get_peft_model_state_dict(model, state_dict=parameters, adapter_name=model.active_adapter)
    # Names in shards are those that ``accelerate/utils/fsdp_utils.py: save_fsdp_model`` passes on.
    start = "model." if is_in_shards else ""
    weights = {start + name: tensor for name, tensor in tensors.items()}
    with _named(checkpoint):
        files = dcp.FileSystemReader(checkpoint / f"{FSDP_MODEL_NAME}_0")
        reader = files if is_in_shards else dcp.HuggingFaceStorageReader(str(checkpoint))
        saved = reader.read_metadata().state_dict_metadata
    # Tied weights can be saved under one name only: safetensors stores no tensor twice.
    taken = {id(tensor) for name, tensor in weights.items() if name in saved}
    missing = [name for name, tensor in weights.items() if id(tensor) not in taken]
    if strangers := sorted(missing) or sorted(saved.keys() - weights.keys()):
        raise TrainingError(
            f"The weights in the checkpoint are not those of this model: {len(strangers)} names differ, such as "
            f"{strangers[0].removeprefix(start)}.",
            hint=OTHER_MODEL,
        )
    left = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in taken]
    if left:
        raise TrainingError(
            f"The checkpoint lacks {len(left)} of the parameters that are trained, such as {left[0]}.", hint=OTHER_MODEL
        )
    wanted = {name: tensor.detach() for name, tensor in weights.items() if name in saved}
    dcp.load(wanted, storage_reader=reader, no_dist=True)  # each rank reads by itself and waits for no other
    name, tensor = next(iter(wanted.items()))
    before, now = saved[name].properties.dtype, tensor.dtype
    if before.itemsize <= now.itemsize:
        return ""
    # With mixed precision, accelerate keeps FSDP's weights in float32 (``accelerate/utils/fsdp_utils.py:
    # fsdp2_prepare_model``), and DDP keeps them as loaded.
    return (
        f"weights are {str(before).removeprefix('torch.')} in the checkpoint and are rounded to "
        f"{str(now).removeprefix('torch.')}, the dtype of this run"
    )


_STATE, _GROUPS = "optimizer.state.", "optimizer.param_groups."
"""Prefixes of names in shards: ``accelerate/utils/fsdp_utils.py: save_fsdp_optimizer`` saves nested keys, which torch
joins by dots (``torch/distributed/checkpoint/_nested_dict.py: flatten_state_dict``)."""


def _fill_from_shards(state: dict[str, Any], checkpoint: Path) -> None:
    """Reads FSDP's files into an optimizer's state, by parameter names."""
    with _named(checkpoint):
        reader = dcp.FileSystemReader(checkpoint / f"{Path(OPTIMIZER_NAME).stem}_0")
        saved = reader.read_metadata().state_dict_metadata
    names = {key.removeprefix(_STATE).rpartition(".")[0] for key in saved if key.startswith(_STATE)}
    groups = {key.removeprefix(_GROUPS).partition(".")[0] for key in saved if key.startswith(_GROUPS)}
    _check_same(state, len(names), len(groups))
    dcp.load({"optimizer": state}, storage_reader=reader, no_dist=True)


def _fill_from_file(state: dict[str, Any], checkpoint: Path) -> None:
    """Loads this rank's part of ``optimizer.pt``, in which a parameter's number is its position in the groups."""
    # torch's reader loads the file in rank 0, runs code in it, and sends all of it to every device
    # (``torch/distributed/checkpoint/format_utils.py: BroadcastingTorchSaveReader``).
    with _named(checkpoint), _on_host():
        saved = torch.load(checkpoint / OPTIMIZER_NAME, map_location="cpu", weights_only=True, mmap=True)
    _check_same(state, len(saved["state"]), len(saved["param_groups"]))
    names = [name for group in state["param_groups"] for name in group["params"]]
    for number, kept in saved["state"].items():
        name = names[number]
        for key, whole in kept.items():
            _copy_part(f"{name} ({key})", whole, state["state"][name][key])
    for group, options in zip(state["param_groups"], saved["param_groups"], strict=True):
        group.update({key: value for key, value in options.items() if key not in ("params", *_HOW_IT_STEPS)})


def _check_same(state: Mapping[str, Any], states: int, groups: int) -> None:
    now = len(state["state"]), len(state["param_groups"])
    if (states, groups) != now:
        raise TrainingError(
            f"The optimizer in the checkpoint has state for {states} parameters in {groups} groups, and this run has "
            f"{now[0]} in {now[1]}.",
            hint=OTHER_MODEL,
        )


def _copy_part(name: str, whole: torch.Tensor, part: torch.Tensor) -> None:
    if whole.shape != part.shape:
        raise TrainingError(
            f"{name} has the shape {tuple(whole.shape)} in the checkpoint, and {tuple(part.shape)} in this training.",
            hint=OTHER_MODEL,
        )
    if isinstance(part, DTensor):
        shape, offset = compute_local_shape_and_global_offset(part.shape, part.device_mesh, part.placements)
        whole = whole[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]
        part = part.to_local()
    with _on_host():
        part.copy_(whole)


@contextmanager
def _on_host() -> Iterator[None]:
    """Within the block, a simulated card does not count operations, since the block's tensors are on the host."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        yield


@contextmanager
def _named(checkpoint: Path) -> Iterator[None]:
    """Within the block, errors of an unreadable file become an OutputFolderError about the checkpoint."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        raise OutputFolderError(
            f"Cannot resume from {checkpoint}, because its files cannot be read: {described(error)}",
            hint=instead_of(checkpoint),
        ) from error
