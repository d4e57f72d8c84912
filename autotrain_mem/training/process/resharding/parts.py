"""Puts whole tensors of the host where a training has them: on each device whole, or each rank's shard alone.

What lies on the host on the way there is not the device's: a simulated card does not count it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from autotrain_mem.support.errors import TrainingError
from autotrain_mem.training.process.resharding.names import OptimizerOrder, Weight, options_of
from autotrain_mem.training.process.resharding.saved import Saved, State, without_parameters

_HOW_IT_STEPS = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how an optimizer computes, not what (``torch/optim/adamw.py``): they stay this training's."""


@contextmanager
def on_host() -> Iterator[None]:
    """Inside, a simulated card sees no tensors."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        yield


class TorchParts:
    """A model of one process, under DDP, or in FSDP2's shards, with an optimizer of torch's."""

    def __init__(self, trainer: Any, *, state_on_host: bool) -> None:
        self._trainer, self._state_on_host = trainer, state_on_host

    def put_weight(self, weight: Weight, saved: Saved) -> None:
        with on_host():
            whole = saved.weight(weight.saved_as)
            _check_shape(weight.name, whole, weight.tensor)
        _copy(weight.tensor, whole)

    def put_states(self, order: OptimizerOrder, numbers: Mapping[str, int], saved: Saved) -> None:
        optimizer = self._trainer.optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states: dict[int, dict[str, torch.Tensor]] = {}
        for (name, number), parameter in zip(numbers.items(), parameters, strict=True):
            with on_host():
                whole = saved.state(name, number)
            if whole:
                states[number] = {key: self._state(name, key, value, parameter) for key, value in whole.items()}
        groups = _groups(options_of(order, saved), optimizer.param_groups, order)
        optimizer.load_state_dict({"state": states, "param_groups": groups})

    def _state(self, name: str, key: str, whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if whole.dim() == 0:
            return whole.clone()
        _check_shape(f"{name} ({key})", whole, parameter)
        if self._state_on_host:
            return whole.clone()
        part = torch.empty_like(parameter, dtype=whole.dtype, requires_grad=False)
        _copy(part, whole)
        return part

    def weight(self, weight: Weight) -> torch.Tensor:
        tensor = weight.tensor.detach()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def steps(self) -> Iterator[float]:
        for state in self._trainer.optimizer.state.values():
            if "step" in state:
                yield float(state["step"])

    def states(self) -> int:
        return sum(bool(state) for state in self._trainer.optimizer.state.values())


def _copy(part: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy the part of a tensor that is this rank's."""
    target = part.detach()
    if isinstance(target, DTensor):
        shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        whole = whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
        target = target.to_local()
    with on_host():
        target.copy_(whole)


def _check_shape(name: str, whole: torch.Tensor, part: torch.Tensor) -> None:
    if whole.shape != part.shape:
        raise TrainingError(
            f"{name} has the shape {tuple(whole.shape)} in the checkpoint, and {tuple(part.shape)} in this training.",
            hint="Resume with the model, the LoRA settings and the optimizer of the first run.",
        )


def _groups(
    options: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]], order: OptimizerOrder
) -> list[dict[str, Any]]:
    groups, first = [], 0
    for kept, group, names in zip(options, current, order.groups, strict=True):
        numbers = list(range(first, first + len(names)))
        first += len(names)
        computes = {name: group[name] for name in _HOW_IT_STEPS if name in group}
        groups.append({**(kept or without_parameters(group)), **computes, "params": numbers})
    return groups


def states_of(saved: Saved, numbers: Mapping[str, int]) -> Iterator[tuple[str, State]]:
    """Each parameter's state, whole, on the host."""
    for name, number in numbers.items():
        with on_host():
            yield name, saved.state(name, number)
