"""Finds what a checkpoint holds of a model, under which name, and in which order an optimizer has its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict

from autotrain_mem.support.errors import TrainingError
from autotrain_mem.training.process.resharding.saved import Saved

OTHER_MODEL = "Resume with the model and the LoRA settings of the first run."


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A tensor of the model, and the name that it has in the checkpoint."""

    name: str
    tensor: torch.Tensor
    saved_as: str


def weights_of(model: Any, saved: Saved) -> list[Weight]:
    """Pair each tensor that a checkpoint is to hold with the one that it holds; tied ones have one of their names.

    Raises:
        TrainingError: the checkpoint lacks some, has others, or there are several adapters.
    """
    is_adapter = isinstance(model, PeftModel)
    if is_adapter and saved.has_names_of_model:
        every = model.named_parameters(remove_duplicate=False)
        tensors = {name: (name, each) for name, each in every if each.requires_grad}
    else:
        tensors = _adapter(model) if is_adapter else _whole(model)
    aliases: dict[int, list[tuple[str, str]]] = {}
    for saved_as, (name, tensor) in tensors.items():
        aliases.setdefault(id(tensor), []).append((name, saved_as))
    found, missing = [], []
    by_id = {id(tensor): tensor for _, tensor in tensors.values()}
    for key, names in aliases.items():
        there = [(name, saved_as) for name, saved_as in names if saved_as in saved.names]
        if there:
            name, saved_as = there[0]
            found.append(Weight(name=name, tensor=by_id[key], saved_as=saved_as))
        else:
            missing.append(names[0][1])
    if strangers := sorted(missing) or sorted(saved.names - tensors.keys()):
        raise TrainingError(
            f"The weights in the checkpoint are not those of this model: {len(strangers)} names differ, such as "
            f"{strangers[0]}.",
            hint=OTHER_MODEL,
        )
    return found


def _whole(model: Any) -> dict[str, tuple[str, torch.Tensor]]:
    kept = set(model.state_dict())
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= {name: tensor for name, tensor in model.named_buffers() if name in kept}
    return {name: (name, tensor) for name, tensor in tensors.items() if name in kept}


def _adapter(model: PeftModel) -> dict[str, tuple[str, torch.Tensor]]:
    """PEFT writes names without the adapter's own (``peft/utils/save_and_load.py: get_peft_model_state_dict``)."""
    if len(model.peft_config) > 1:
        raise TrainingError(
            f"The model has {len(model.peft_config)} adapters, and a checkpoint shared otherwise is read for one.",
            hint="Resume as the run was begun.",
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stands_for = {name: torch.empty(0, device="meta") for name in parameters}
    names = {id(tensor): name for name, tensor in stands_for.items()}
    written = get_peft_model_state_dict(model, state_dict=stands_for, adapter_name=model.active_adapter)
    return {key: (names[id(tensor)], parameters[names[id(tensor)]]) for key, tensor in written.items()}


class OptimizerOrder:
    """Notes the names of an optimizer's parameters as it is made: the number of each is its place in a checkpoint.

    Later they are shards, or parts of one flat tensor. transformers makes it of the parameters with decay and of those
    without, each in the model's order (``transformers/trainer.py: create_optimizer``).
    """

    def __init__(self, trainer: Any) -> None:
        self.groups: list[list[str]] = []
        create = trainer.create_optimizer

        def create_optimizer(*args: Any, **options: Any) -> Any:
            is_new = trainer.optimizer is None
            optimizer = create(*args, **options)
            if is_new:
                names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
                self.groups = [
                    [names[id(parameter)] for parameter in group["params"]] for group in trainer.optimizer.param_groups
                ]
            return optimizer

        trainer.create_optimizer = create_optimizer

    @property
    def names(self) -> list[str]:
        return [name for group in self.groups for name in group]


def numbered(order: OptimizerOrder, saved: Saved) -> Mapping[str, int]:
    """The number of each parameter that an optimizer has.

    Raises:
        TrainingError: the checkpoint's optimizer has other groups, or state for some of its parameters only.
    """
    names, states, groups = order.names, saved.states(), len(saved.options())
    if states not in (0, len(names)) or groups not in (len(order.groups), sum(map(bool, order.groups))):
        raise TrainingError(
            f"The optimizer in the checkpoint has state for {states} parameters in {groups} groups, and this training "
            f"has {len(names)} in {len(order.groups)}.",
            hint=OTHER_MODEL,
        )
    return {name: number for number, name in enumerate(names)}


def options_of(order: OptimizerOrder, saved: Saved) -> list[Mapping[str, Any]]:
    """The options of each group; none of one without parameters, as LoRA's without decay, which DeepSpeed leaves out
    (``deepspeed/runtime/engine.py: _configure_optimizer``)."""
    options = iter(saved.options())
    if len(saved.options()) == len(order.groups):
        return list(options)
    return [next(options) if names else {} for names in order.groups]
