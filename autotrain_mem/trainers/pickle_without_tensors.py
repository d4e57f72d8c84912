"""Serializes objects of the user's process for the rehearsal's process, without the values of tensors."""

import enum
import importlib
import io
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import dill
import torch
from accelerate.utils.operations import ConvertOutputsToFp32
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from autotrain_mem.support.errors import UsageError


def pack(value: Any) -> bytes:
    """Serializes any value; :func:`unpack` rebuilds it in another process of the same environment.

    A tensor is written as its shape, stride, dtype and ``requires_grad``: Qwen2.5-0.5B takes 58 kB. Classes and
    functions from ``__main__``, a notebook or another function are written by value, with the globals that they use.
    Those from a module are written by reference, with this process's search path. Devices become the CPU, and
    ``hf_device_map`` is left out. Raises UsageError if the value holds an object that cannot leave its process, such
    as a generator or an open connection.
    """
    stream = io.BytesIO()
    pickle.dump([os.path.abspath(place) for place in sys.path], stream)
    try:
        _Pickler(stream).dump(value)
    except _StuckError as stuck:
        raise UsageError(
            f"A {stuck.kind}{stuck.holder} cannot be sent to the process that rehearses: {stuck.__cause__}",
            hint="Create it inside the function or method that uses it, so that it is not passed to the trainer.",
        ) from stuck.__cause__
    return stream.getvalue()


def unpack(data: bytes) -> Any:
    """Rebuilds a packed value. Its tensors are fake under a fake mode, otherwise on the meta device.

    Shared tensors are shared again. A quantized weight becomes an ordinary parameter with the same attributes, since
    bitsandbytes' own class cannot hold a fake tensor. Only leaf tensors still require gradients; gradients and tensor
    hooks are left out. Modules are imported from the search path of the packing process.
    """
    stream = io.BytesIO(data)
    theirs = pickle.load(stream)
    sys.path[:] = [*theirs, *(place for place in sys.path if place not in theirs)]
    return _Unpickler(stream, ignore=True).load()


_AS_ON_THE_CPU: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    torch.device: lambda device: (torch.device, ("cpu",)),
    torch.Generator: lambda generator: (torch.Generator, ()),  # its state is a tensor
    type(threading.Lock()): lambda lock: (threading.Lock, ()),
    type(threading.RLock()): lambda lock: (threading.RLock, ()),  # dill's copy stays locked, without an owner
    torch.autocast: lambda autocast: (
        torch.autocast,
        ("cpu", autocast.fast_dtype, autocast._enabled, autocast._cache_enabled),
    ),
    ConvertOutputsToFp32: lambda forward: (ConvertOutputsToFp32, (forward.model_forward,)),
}
"""Type that cannot be copied as it is -> its reducer. When accelerate prepares a model for mixed precision, it wraps
the model's ``forward`` in objects of the last two types (``accelerate/accelerator.py: prepare_model``)."""


class _Tensor:
    """Represents the storage of a tensor, which several tensors can share (``Int8Params.CB``)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            moved = torch.empty_like(tensor, device="meta")  # keeps the strides that a copy to a GPU keeps
        self.facts = (tuple(moved.shape), moved.stride(), moved.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, self.facts


class _StuckError(Exception):
    """Reports an object that cannot be serialized, and the object that holds it."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind
        self.holder = ""

    def pass_through(self, value: Any) -> None:
        """Records ``value`` as the holder, unless it is a built-in container or a closer holder is already recorded."""
        named = value if isinstance(value, (type, types.FunctionType)) else type(value)
        if not self.holder and named.__module__ != "builtins":
            self.holder = f" (held by {named.__qualname__})"


class _Pickler(dill.Pickler):  # type: ignore[misc]  # dill is untyped to mypy here
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL, recurse=True)
        self._tensors: dict[tuple[Any, ...], _Tensor] = {}
        self._of_a_parameter: set[tuple[Any, ...]] = set()

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        try:
            super().save(value, save_persistent_id)
        except _StuckError as stuck:
            stuck.pass_through(value)
            raise
        except Exception as error:  # any error: objects have their own pickling methods
            raise _StuckError(type(value).__qualname__) from error

    def reducer_override(self, value: Any) -> Any:
        """Returns our reduction of a value. ``pickle`` calls this method before its own reductions."""
        kind = type(value)
        if issubclass(kind, torch.Tensor) and value.layout is torch.strided:
            is_parameter = isinstance(value, torch.nn.Parameter)
            trains = value.requires_grad and value.is_leaf
            arguments = (self._bytes_of(value, is_parameter), is_parameter, trains)
            return _tensor, arguments, vars(value) or None, None, None, _fill
        if issubclass(kind, type) and _is_own(value):
            return _reduce_class(value)
        if issubclass(kind, type | types.FunctionType) and _is_in_its_module(value):
            return value.__qualname__  # by reference
        if issubclass(kind, types.ModuleType):  # dill would write the contents of a user's module
            return _module, (value.__name__,)
        if issubclass(kind, torch.nn.Module) and "hf_device_map" in vars(value):
            build, arguments, state, *rest = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return build, arguments, {name: state[name] for name in state if name != "hf_device_map"}, *rest
        return _AS_ON_THE_CPU[kind](value) if kind in _AS_ON_THE_CPU else NotImplemented

    def _bytes_of(self, tensor: torch.Tensor, is_parameter: bool) -> _Tensor:
        """Returns the storage of a tensor. Two parameters never share a storage: on a GPU each would get its own."""
        where = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if where not in self._tensors or (is_parameter and where in self._of_a_parameter):
            self._tensors[where] = _Tensor(tensor)
        if is_parameter:
            self._of_a_parameter.add(where)
        return self._tensors[where]


def _is_in_its_module(value: Any) -> bool:
    """Returns whether a class or function is found under its name in its module. dill's own check fails for optimizers:
    it follows attributes from the package, but ``torch/optim/__init__.py`` deletes the names of its modules."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value and value.__module__ != "__main__"


class _Unpickler(dill.Unpickler):  # type: ignore[misc]
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


_SET_BY_TYPE = frozenset({"__dict__", "__weakref__", "_abc_impl", "__module__", "__qualname__", "__slots__"})


def _is_own(kind: type) -> bool:
    """Returns whether a class was defined in a script, a notebook or a function. dill handles named tuples itself."""
    is_named_tuple = kind.__bases__ == (tuple,) and hasattr(kind, "_fields")
    return (kind.__module__ == "__main__" or "<locals>" in kind.__qualname__) and not is_named_tuple


def _reduce_class(kind: type) -> tuple[Any, ...]:
    """Returns the reduction of a class. It is rebuilt empty, so that its attributes can refer to it, and then gets
    them. Its source is not run again: annotations may use names that exist only in the script."""
    if issubclass(kind, enum.Enum):
        body = {member.name: member.value for member in kind}
        attributes = {name: value for name, value in vars(kind).items() if isinstance(value, _DEFINED)}
    else:
        slots = vars(kind).get("__slots__")
        body = {} if slots is None else {"__slots__": slots}
        left_out = {*_SET_BY_TYPE, *([slots] if isinstance(slots, str) else slots or ())}
        attributes = {name: value for name, value in vars(kind).items() if name not in left_out}
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return _new_class, (type(kind), kind.__name__, kind.__bases__, names | body), attributes, None, None, _fill


_DEFINED = (types.FunctionType, property, classmethod, staticmethod)


def _new_class(metaclass: type, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
    # For an enumeration, ``update`` of the namespace registers each member (``enum.py: _EnumDict.update``).
    return types.new_class(name, bases, {"metaclass": metaclass}, lambda namespace: namespace.update(body))


def _fill(value: Any, attributes: dict[str, Any]) -> None:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
