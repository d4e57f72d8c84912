"""Reads a checkpoint's weights and optimizer state tensor by tensor, in host memory: no rank ever holds all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils.constants import FSDP_MODEL_NAME
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers.trainer import OPTIMIZER_NAME

State = Mapping[str, torch.Tensor]
"""Of one parameter, such as ``step``, ``exp_avg`` and ``exp_avg_sq``."""


class Saved(Protocol):
    """Reads what a checkpoint holds, in whatever form."""

    names: frozenset[str]
    """Of its weights."""
    has_names_of_model: bool
    """Also of an adapter's; else as PEFT writes them."""

    def weight(self, name: str) -> torch.Tensor:
        """One weight, whole, on the host."""

    def state(self, name: str, index: int) -> State:
        """The optimizer's state of one parameter, whole, on the host.

        Args:
            name: The parameter's.
            index: Its number among those that the optimizer has, group by group.
        """

    def options(self) -> Sequence[Mapping[str, Any]]:
        """The optimizer's groups without their parameters: learning rate and the like."""

    def states(self) -> int:
        """Counts the parameters of which there is optimizer state."""


class WholeFiles:
    """A checkpoint of one process or of DDP: ``*.safetensors`` and ``optimizer.pt``, which are mapped, not read."""

    has_names_of_model = False

    def __init__(self, checkpoint: Path, close: ExitStack) -> None:
        adapter = checkpoint / "adapter_model.safetensors"
        files = [adapter] if adapter.is_file() else sorted(checkpoint.glob("model*.safetensors"))
        opened = [close.enter_context(safe_open(file, "pt")) for file in files]
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118  # it is no mapping
        self.names = frozenset(self._files)
        self._optimizer = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True, mmap=True)

    def weight(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def state(self, name: str, index: int) -> State:
        return {key: torch.as_tensor(value) for key, value in self._optimizer["state"].get(index, {}).items()}

    def options(self) -> Sequence[Mapping[str, Any]]:
        return [without_parameters(group) for group in self._optimizer["param_groups"]]

    def states(self) -> int:
        return len(self._optimizer["state"])


class Shards:
    """A checkpoint of FSDP's ranks, in the files of ``torch.distributed.checkpoint``.

    Names are as ``accelerate/utils/fsdp_utils.py: save_fsdp_model, save_fsdp_optimizer`` hand them over, joined by dots
    (``torch/distributed/checkpoint/_nested_dict.py: flatten_state_dict``).
    """

    has_names_of_model = False

    def __init__(self, checkpoint: Path) -> None:
        self._model = _Reader(checkpoint / f"{FSDP_MODEL_NAME}_0")
        self._optimizer = _Reader(checkpoint / f"{Path(OPTIMIZER_NAME).stem}_0")
        self.names = frozenset(self._model.names("model."))
        keys: dict[str, list[str]] = {}
        for key in self._optimizer.names(_STATE):
            parameter, _, name = key.rpartition(".")
            keys.setdefault(parameter, []).append(name)
        self._keys = keys

    def weight(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._model.read([f"model.{name}"])[f"model.{name}"]
        return tensor

    def state(self, name: str, index: int) -> State:
        keys = self._keys.get(name, [])
        read = self._optimizer.read([f"{_STATE}{name}.{key}" for key in keys])
        return {key: read[f"{_STATE}{name}.{key}"] for key in keys}

    def options(self) -> Sequence[Mapping[str, Any]]:
        groups: dict[int, dict[str, Any]] = {}
        names = [_GROUPS + key for key in self._optimizer.names(_GROUPS)]
        for key, value in self._optimizer.read(names).items():
            number, _, option = key.removeprefix(_GROUPS).partition(".")
            groups.setdefault(int(number), {})[option] = value
        return [without_parameters(groups[number]) for number in sorted(groups)]

    def states(self) -> int:
        return len(self._keys)


_STATE, _GROUPS = "optimizer.state.", "optimizer.param_groups."


class _Reader:
    """Files of one state, whose index is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = dcp.FileSystemReader(folder).read_metadata()

    def names(self, start: str) -> Iterator[str]:
        return (name.removeprefix(start) for name in self._index.state_dict_metadata if name.startswith(start))

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """Each rank reads for itself: none waits for another, and nothing passes between them."""
        read: dict[str, Any] = dict.fromkeys(names)
        for name in names:
            if isinstance(each := self._index.state_dict_metadata[name], TensorStorageMetadata):
                read[name] = torch.empty(tuple(each.size), dtype=each.properties.dtype)
        reader = dcp.FileSystemReader(self._folder)
        reader.read_metadata = lambda *args, **options: self._index
        if read:
            dcp.load(read, storage_reader=reader, no_dist=True)
        return read


def without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an optimizer's group."""
    return {name: value for name, value in group.items() if name != "params"}
