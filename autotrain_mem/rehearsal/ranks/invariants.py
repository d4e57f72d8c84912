"""Checks that a rehearsed rank trained every parameter.

Sharding can fail silently: an optimizer that still holds the unsharded parameters updates nothing, and its state is
missing from the prediction.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch.nn.modules import module as hooks

from autotrain_mem.rehearsal.ranks.recording import local
from autotrain_mem.support.errors import RehearsalError

_WAITING = ("gradient which is undefined", "mark a variable ready only once")
"""DDP's errors for a missing gradient (``torch/csrc/distributed/c10d/reducer.cpp: finalize_bucket_dense,
mark_variable_ready``)."""
LARGEST_PADDING = 0.001
"""The share of elements by which all shards together can differ from the model; padding to whole rows is extra."""


@contextmanager
def trained_in_full(trainer: Any) -> Iterator[None]:
    """Checks, after a trainer has trained within the block, that every used parameter has optimizer state. Raises
    RehearsalError if one has none, since the prediction would be too low."""
    ran: set[int] = set()
    try:
        with hooks.register_module_forward_pre_hook(lambda module, _: ran.add(id(module))):
            yield
    except RuntimeError as error:
        if any(words in str(error) for words in _WAITING):
            raise _without_gradient("some parameters") from error
        raise
    model = trainer.accelerator.unwrap_model(trainer.model)
    for module in model.modules():
        if isinstance(module, ParamWrapper) and id(module) in ran:  # it reads the weights of layers that do not run
            ran |= {id(layer) for layers in (module.lora_A, module.lora_B) for layer in layers.values()}
    used = {
        name: parameter
        for prefix, module in model.named_modules()
        if id(module) in ran
        for name, parameter in module.named_parameters(prefix, recurse=False)
        if parameter.requires_grad and local(parameter).numel()  # some shards of a small parameter are empty
    }
    if not used or trainer.state.global_step == 0:
        raise _broken("the optimizer made no step, or nothing was trained")
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if getattr(trainer, "is_deepspeed_enabled", False):
        _check_flat(optimizer, model, trainer.deepspeed)
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if missing := [name for name, parameter in used.items() if id(parameter) not in held]:
        raise _broken(f"the optimizer does not hold {_some(missing)}")
    with_state = {id(parameter) for parameter, state in optimizer.state.items() if state}
    if with_state and (missing := [name for name, each in used.items() if id(each) not in with_state]):
        raise _without_gradient(_some(missing))


def _check_flat(optimizer: Any, model: torch.nn.Module, engine: Any) -> None:
    """Checks that DeepSpeed's optimizer holds this rank's part of all trained parameters, and skipped no step."""
    elements = sum(getattr(each, "ds_numel", each.numel()) for each in model.parameters() if each.requires_grad)
    inner = optimizer.optimizer
    flat = [parameter for group in inner.param_groups for parameter in group["params"]]
    held = getattr(optimizer, "fp32_partitioned_groups_flat", None) or flat
    ranks = engine.seq_dp_world_size
    count = sum(part.numel() for part in held) * ranks
    if not elements * (1 - LARGEST_PADDING) <= count <= elements * (1 + LARGEST_PADDING) + ranks * 1024:
        raise _broken(f"the optimizer holds {count} of {elements} parameters")
    if engine.skipped_steps or not engine.global_steps:
        raise _broken(f"{engine.skipped_steps} steps were skipped, and {engine.global_steps} made")
    if not all(inner.state.get(parameter) for parameter in flat):
        raise _broken("the optimizer did not update some of its parameters")


def check_shards(before: dict[str, int], model: torch.nn.Module, shards: int) -> None:
    """Checks that a model's shards add up to all elements; ``before`` has each parameter's number of elements.

    Raises RehearsalError if the shards have more or fewer elements, apart from padding.
    """
    whole = sum(before.values())
    held = sum(local(parameter).numel() for parameter in model.parameters()) * shards
    rows = sum(shards * parameter.shape[1:].numel() for parameter in model.parameters())
    if not whole * (1 - LARGEST_PADDING) - rows <= held <= whole * (1 + LARGEST_PADDING) + rows:
        raise _broken(f"its shards hold {held} of {whole} parameters")


def _without_gradient(names: str) -> RehearsalError:
    """Makes the error for parameters without a gradient, such as the unused last layers of a vision tower."""
    return RehearsalError(
        f"The optimizer did not update {names}: the loss does not depend on them, or they were lost when the model "
        "was sharded across the processes.",
        hint="This cannot be rehearsed on several GPUs yet. If the loss does not depend on parts of the model, DDP "
        "fails in its second step without --ddp_find_unused_parameters true. --gpus 1 plans for one GPU.",
    )


def _some(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more parameters" if len(names) > 1 else names[0]


def _broken(what: str) -> RehearsalError:
    return RehearsalError(
        f"The rehearsal of one rank is incomplete: {what}.",
        hint="The prediction would be too low, so none is given. Please report the model, the method and the flags. "
        "Another value of --sharding may work, such as --sharding ddp.",
    )
