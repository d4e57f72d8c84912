"""Reads a checkpoint of DeepSpeed's ranks tensor by tensor: its files are mapped, and each rank's part is joined.

Layouts are those of ``deepspeed/utils/zero_to_fp32.py``, which joins weights alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autotrain_mem.training.checkpoints import processes_of
from autotrain_mem.training.process.resharding.saved import State, without_parameters

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt$")


class ZeroFiles:
    """A checkpoint of ZeRO's; its names are the model's own, also those of an adapter.

    A trained weight is what the optimizer steps on, in float32.
    """

    has_names_of_model = True

    def __init__(self, checkpoint: Path) -> None:
        (folder,) = {file.parent for file in checkpoint.glob("global_step*/*mp_rank_00_model_states.pt")}
        ranks = {int(found[1]): file for file in folder.iterdir() if (found := _RANK.search(file.name))}
        model = _mapped(next(folder.glob("*mp_rank_00_model_states.pt")))
        count = max(len(ranks), processes_of(checkpoint))
        states = [_mapped(ranks[rank])["optimizer_state_dict"] for rank in range(count)]
        shapes: dict[str, torch.Size] = {name: size for group in model["param_shapes"] for name, size in group.items()}
        self._shapes = shapes
        self._parts = _Third(states, shapes) if "fp32_flat_groups" in states[0] else _Second(states)
        tied: Mapping[str, str] = model.get("shared_params") or {}
        self._tied = {name: first for name, first in tied.items() if first in shapes}
        self.names = frozenset({*shapes, *self._tied})

    def weight(self, name: str) -> torch.Tensor:
        return self._joined(self._tied.get(name, name), None)

    def state(self, name: str, index: int) -> State:
        group = self._parts.state_of(name)
        return {
            key: self._joined(name, key)
            if isinstance(value, torch.Tensor) and value.dim()
            else torch.tensor(float(value))
            for key, value in group.items()
        }

    def options(self) -> Sequence[Mapping[str, Any]]:
        return [without_parameters(group) for group in self._parts.groups]

    def states(self) -> int:
        return sum(bool(self._parts.state_of(name)) for name in self._shapes)

    def _joined(self, name: str, key: str | None) -> torch.Tensor:
        shape = self._shapes[name]
        flat = torch.cat(list(self._parts.of(name, key)))
        return flat[: math.prod(shape)].reshape(shape)


class _Second:
    """Stages 1 and 2: a flat tensor of a group is cut evenly, and says which part of which weight it holds
    (``runtime/zero/stage_1_and_2.py: state_dict``)."""

    def __init__(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._states = states
        self.groups = states[0]["base_optimizer_state"]["param_groups"]
        self._places: dict[str, list[tuple[int, int, Any]]] = {}
        for rank, state in enumerate(states):
            for group, places in enumerate(state["param_slice_mappings"]):
                for name, place in places.items():
                    self._places.setdefault(name, []).append((rank, group, place))

    def of(self, name: str, key: str | None) -> Iterator[torch.Tensor]:
        """Each rank's part of a weight, or of its state by that name."""
        for rank, group, place in self._places[name]:
            state = self._states[rank]
            kept = state["base_optimizer_state"]["state"]
            flat = state["single_partition_of_fp32_groups"][group] if key is None else kept[group][key]
            yield flat.narrow(0, place.start, place.numel)

    def state_of(self, name: str) -> Mapping[str, Any]:
        """The state of the flat tensor that holds it, of a rank that has some of it."""
        rank, group, _ = self._places[name][0]
        state: Mapping[str, Any] = self._states[rank]["base_optimizer_state"]["state"].get(group, {})
        return state


class _Third:
    """Stage 3: each weight is cut evenly, and padded; a rank's parts lie one after the other, in several flat tensors
    where they are many (``zero_to_fp32.py: _zero3_merge_trainable_params``)."""

    def __init__(self, states: Sequence[Mapping[str, Any]], shapes: Mapping[str, torch.Size]) -> None:
        self._states = states
        self.groups = states[0]["optimizer_state_dict"]["param_groups"]
        sizes = [flat.numel() for flat in states[0]["fp32_flat_groups"]]
        self._places: dict[str, tuple[int, int, int]] = {}
        group = start = 0
        for name, shape in shapes.items():
            count = math.ceil(math.prod(shape) / len(states))
            while start + count > sizes[group]:
                group, start = group + 1, 0
            self._places[name] = (group, start, count)
            start += count

    def of(self, name: str, key: str | None) -> Iterator[torch.Tensor]:
        group, start, count = self._places[name]
        for state in self._states:
            kept = state["optimizer_state_dict"]["state"]
            flat = state["fp32_flat_groups"][group] if key is None else kept[group][key]
            yield flat.narrow(0, start, count)

    def state_of(self, name: str) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._states[0]["optimizer_state_dict"]["state"].get(self._places[name][0], {})
        return state


def _mapped(file: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return content
