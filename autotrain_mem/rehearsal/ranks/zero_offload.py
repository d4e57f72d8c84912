"""DeepSpeed's offload where CPU tensors play the GPU's: which of them lie on the host, by the words that moved them.

DeepSpeed says ``cpu`` where it means the host, and asks its accelerator for the name of the device. The name that it
gets here is a text of its own class, and tensors on the host say another one of theirs, so that what is made or moved
by either is told apart. Copies between the two convert on the host (``aten/src/ATen/native/cuda/Copy.cu:
copy_kernel_cuda``), and so take nothing of the device but their result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.ops.adam import cpu_adam
from torch.overrides import TorchFunctionMode

from autotrain_mem.rehearsal.known_values import tensors_in
from autotrain_mem.rehearsal.ranks.host_adam import HostAdamBuilder
from autotrain_mem.rehearsal.ranks.recording import RankRecorder
from autotrain_mem.rehearsal.trace.operator_costs import Cost
from autotrain_mem.types.work import Kind

DEVICE_OF = torch.Tensor.device.__get__
TO = torch.Tensor.to
CPU = torch.Tensor.cpu


class DeviceName(str):
    """The accelerator's name of the device: ``cpu``, which stands for a GPU."""


class _Host(str):
    """A tensor on the host says that it lies here."""

    type = "cpu"

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)

    __hash__ = str.__hash__


_HOST = _Host("cpu")


class HostTensors:
    """Knows which storages lie on the host."""

    def __init__(self, recorder: RankRecorder) -> None:
        self._recorder = recorder
        self._storages: weakref.WeakKeyDictionary[torch.UntypedStorage, Callable[[], object]] = (
            weakref.WeakKeyDictionary()
        )
        """With what ends it as one that is not pinned."""
        self.locked: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        """Of those that a device can copy by itself."""

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage() in self._storages

    def add(self, tensor: Any) -> Any:
        """Say that a tensor lies on the host; returns it."""
        if isinstance(tensor, torch.Tensor) and tensor not in self:
            storage = tensor.untyped_storage()
            self._storages[storage] = self._recorder.unpinned.take(storage, storage.nbytes())
        return tensor

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], execute: Any) -> Any:
        """Run an operator that meets a tensor on the host; what is made of nothing else lies there too."""
        given = [*tensors_in((*args, *kwargs.values()))]
        on_host = [tensor in self for tensor in given]
        out = execute(func, args, kwargs)
        if all(on_host):
            for tensor in tensors_in([out]):
                self.add(tensor)
        elif func is torch.ops.aten.copy_.default:
            self.note(given[0])
        return out

    def meets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether an operator is given a tensor that lies on the host."""
        return any(tensor in self for tensor in tensors_in((*args, *kwargs.values())))

    def to_device(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Bring a tensor to the device."""
        with torch._C.DisableTorchFunction(), self._recorder.unseen():
            converted = tensor.detach().to(dtype)
        self.note(converted)
        self._recorder.host = None  # a copy that is the device's
        try:
            return converted.clone()
        finally:
            self._recorder.host = self

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Bring a tensor to the host."""
        with torch._C.DisableTorchFunction(), self._recorder.unseen():
            arrived = tensor.detach().to(dtype, copy=True)
        self.note(tensor)
        self.add(arrived)
        return arrived

    def note(self, tensor: torch.Tensor) -> None:
        """Count a copy between host and device."""
        self._recorder.work.note(Cost(kind=Kind.OVERLAPPED_COPY, fixed_bytes=int(tensor.nbytes), launches=1))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor as pinned: a copy, after which nobody needs the tensor."""
        self._recorder.pinned.take(tensor.untyped_storage(), int(tensor.nbytes))
        self._recorder.disown(tensor)  # made without a word of where
        self.add(tensor)
        self._storages[tensor.untyped_storage()]()
        self.locked.add(tensor.untyped_storage())
        return tensor


class _Devices(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped to mypy here
    """Reads where tensors are made and moved."""

    def __init__(self, recorder: RankRecorder, host: HostTensors) -> None:
        super().__init__()
        self._recorder, self._host = recorder, host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE_OF:
            return _HOST if args[0] in self._host else func(*args)
        if func is TO or func is CPU:
            target = _HOST if func is CPU else _place(args[1:], kwargs)
            if target is not None:
                return self._moved(args[0], target, _dtype(args, kwargs) or args[0].dtype, func, args, kwargs)
        elif _is_host(kwargs.get("device")):
            with self._recorder.unseen():
                return self._host.add(func(*args, **kwargs))
        return func(*args, **kwargs)

    def _moved(self, tensor: Any, target: Any, dtype: torch.dtype, func: Any, args: Any, kwargs: Any) -> Any:
        if str(target) != "cpu":  # ``meta``
            return func(*args, **kwargs)
        is_there = tensor in self._host
        if _is_host(target) == is_there:
            return func(*args, **kwargs)
        return self._host.to_device(tensor, dtype) if is_there else self._host.to_host(tensor, dtype)


def _is_host(place: Any) -> bool:
    return isinstance(place, str) and not isinstance(place, DeviceName) and str(getattr(place, "value", place)) == "cpu"


def _place(args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    """Finds what ``to`` is given of a device: a text, or a torch.device, which only a tensor on the device has."""
    given = [*args, kwargs.get("device")]
    return next((each for each in given if isinstance(each, (str, torch.device))), None)


def _dtype(args: Iterable[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
    return next((each for each in (*args, kwargs.get("dtype")) if isinstance(each, torch.dtype)), None)


@contextmanager
def zero_offload(recorder: RankRecorder) -> Iterator[HostTensors]:
    """Inside, what DeepSpeed offloads is not on the device."""
    host = recorder.host = HostTensors(recorder)
    with ExitStack() as stack:
        stack.enter_context(patch.object(cpu_adam, "CPUAdamBuilder", HostAdamBuilder))
        stack.enter_context(patch.object(torch.Tensor, "is_pinned", lambda tensor, *_: tensor in host))
        stack.enter_context(_Devices(recorder, host))
        yield host
