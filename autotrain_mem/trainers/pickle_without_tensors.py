"""Serializes objects of the user's process for the rehearsal's process, without the values of tensors."""

import functools
import importlib
import io
import os
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import torch
from accelerate.utils.operations import ConvertOutputsToFp32
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from autotrain_mem.support.errors import UsageError


def pack(value: Any, parts: Mapping[str, Any] | None = None) -> bytes:
    """Serializes any value; :func:`unpack` rebuilds it in another process of the same environment.

    A tensor is written as its shape, stride, dtype and ``requires_grad``: Qwen2.5-0.5B takes 58 kB. Classes and
    functions from ``__main__``, a notebook or another function are written by value, with the globals that they use.
    Those from a module are written by reference, with this process's search path. Devices become the CPU, and
    ``hf_device_map`` is left out. ``parts`` are those of the value that an error can name. Raises UsageError if the
    value holds an object that cannot leave its process, such as a generator or an open connection.
    """
    stream = io.BytesIO()
    pickle.dump([os.path.abspath(place) for place in sys.path], stream)
    try:
        _Pickler(stream).dump(value)
    except Exception as error:  # any error: objects have their own pickling methods
        stuck = next((name for name, part in (parts or {}).items() if _stays_here(part)), "The call")
        raise UsageError(
            f"{stuck} cannot be sent to the process that rehearses: {str(error) or type(error).__name__}",
            hint="Create it inside the function or method that uses it, so that it is not passed to the trainer.",
        ) from error
    return stream.getvalue()


def _stays_here(value: Any) -> bool:
    try:
        _Pickler(io.BytesIO()).dump(value)
    except Exception:  # as in pack
        return True
    return False


def unpack(data: bytes) -> Any:
    """Rebuilds a packed value. Its tensors are fake under a fake mode, otherwise on the meta device.

    Shared tensors are shared again. A quantized weight becomes an ordinary parameter with the same attributes, since
    bitsandbytes' own class cannot hold a fake tensor. Only leaf tensors still require gradients; gradients and tensor
    hooks are left out. Modules are imported from the search path of the packing process.
    """
    stream = io.BytesIO(data)
    theirs = pickle.load(stream)
    sys.path[:] = [*theirs, *(place for place in sys.path if place not in theirs)]
    return _Unpickler(stream).load()


_AS_ON_THE_CPU: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    torch.device: lambda device: (torch.device, ("cpu",)),
    torch.Generator: lambda generator: (torch.Generator, ()),  # its state is a tensor
    type(threading.Lock()): lambda lock: (threading.Lock, ()),
    type(threading.RLock()): lambda lock: (threading.RLock, ()),
    torch.autocast: lambda autocast: (
        torch.autocast,
        ("cpu", autocast.fast_dtype, autocast._enabled, autocast._cache_enabled),
    ),
    ConvertOutputsToFp32: lambda forward: (ConvertOutputsToFp32, (forward.model_forward,)),
    weakref.ref: lambda ref: (weakref.ref, (set() if ref() is None else ref(),)),  # to nothing, as the set is gone then
    functools._lru_cache_wrapper: lambda cached: (
        (functools.lru_cache, (cached.__wrapped__,))
        if cached.__module__ == "__main__" or "<locals>" in cached.__qualname__
        else cached.__qualname__  # by reference
    ),
}
"""Type that cannot be copied as it is -> its reducer. When accelerate prepares a model for mixed precision, it wraps
the model's ``forward`` in ``autocast`` and ``ConvertOutputsToFp32`` (``accelerate/accelerator.py: prepare_model``)."""


class _Tensor:
    """Represents the storage of a tensor, which several tensors can share (``Int8Params.CB``)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            moved = torch.empty_like(tensor, device="meta")  # keeps the strides that a copy to a GPU keeps
        self.facts = (tuple(moved.shape), moved.stride(), moved.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, self.facts


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it is untyped
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._tensors: dict[tuple[Any, ...], _Tensor] = {}
        self._of_a_parameter: set[tuple[Any, ...]] = set()

    def reducer_override(self, value: Any) -> Any:
        """Returns our reduction of a value. ``pickle`` calls this method before its own reductions."""
        kind = type(value)
        if issubclass(kind, torch.Tensor) and value.layout is torch.strided:
            is_parameter = isinstance(value, torch.nn.Parameter)
            trains = value.requires_grad and value.is_leaf
            arguments = (self._bytes_of(value, is_parameter), is_parameter, trains)
            return _tensor, arguments, vars(value) or None, None, None, _fill
        if issubclass(kind, types.ModuleType):
            return _module, (value.__name__,)
        if issubclass(kind, torch.nn.Module) and "hf_device_map" in vars(value):
            build, arguments, state, *rest = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return build, arguments, {name: state[name] for name in state if name != "hf_device_map"}, *rest
        return _AS_ON_THE_CPU[kind](value) if kind in _AS_ON_THE_CPU else super().reducer_override(value)

    def _bytes_of(self, tensor: torch.Tensor, is_parameter: bool) -> _Tensor:
        """Returns the storage of a tensor. Two parameters never share a storage: on a GPU each would get its own."""
        where = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if where not in self._tensors or (is_parameter and where in self._of_a_parameter):
            self._tensors[where] = _Tensor(tensor)
        if is_parameter:
            self._of_a_parameter.add(where)
        return self._tensors[where]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        with _disable_current_modes():  # a module that is imported here may create real tensors
            found: Any = super().find_class(module, name)
        if PreTrainedModel in getattr(found, "__mro__", ()):
            # transformers registers a class's optional outputs (hidden states) in its constructor
            # (modeling_utils.py: PreTrainedModel.__init__), which unpickling does not call.
            dict.__setitem__(_CAN_RECORD_REGISTRY, str(found), found._can_record_outputs)
        return found


def _module(name: str) -> types.ModuleType:
    with _disable_current_modes():
        return importlib.import_module(name)


def _blank(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    device = "meta" if detect_fake_mode() is None else "cpu"
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _tensor(blank: torch.Tensor, is_parameter: bool, trains: bool) -> torch.Tensor:
    if is_parameter:
        return torch.nn.Parameter(blank, requires_grad=trains)
    return blank.detach().requires_grad_(trains)


def _fill(value: Any, attributes: dict[str, Any]) -> None:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
