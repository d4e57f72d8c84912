"""Emulates DeepSpeed's offload on CPU tensors: two string classes distinguish the device ``cpu`` from the host ``cpu``.

Copies between device and host convert dtypes on the host (``aten/src/ATen/native/cuda/Copy.cu: copy_kernel_cuda``), so
only their result takes device memory.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.ops.adam import cpu_adam
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from autotrain_mem.rehearsal.known_values import tensors_in
from autotrain_mem.rehearsal.ranks.recording import RankRecorder
from autotrain_mem.rehearsal.trace.operator_costs import host_copy

DEVICE_OF = torch.Tensor.device.__get__
TO = torch.Tensor.to
CPU = torch.Tensor.cpu


class DeviceName(str):
    """The accelerator's name of the device: ``cpu``, which stands for a GPU."""


class _Host(str):
    """Marks a tensor as being on the host."""

    type = "cpu"

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)

    __hash__ = str.__hash__


_HOST = _Host("cpu")


class HostTensors:
    def __init__(self, recorder: RankRecorder) -> None:
        self._recorder = recorder
        self._storages: weakref.WeakKeyDictionary[torch.UntypedStorage, Callable[[], object]] = (
            weakref.WeakKeyDictionary()
        )
        """Maps each host storage to a function that removes it from the unpinned bytes."""

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage() in self._storages

    def add(self, tensor: Any) -> Any:
        """Registers a tensor that lies on the host; returns it."""
        if isinstance(tensor, torch.Tensor) and tensor not in self:
            storage = tensor.untyped_storage()
            self._storages[storage] = self._recorder.unpinned.take(storage, storage.nbytes())
        return tensor

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], execute: Any) -> Any:
        """Runs an operator that has a host tensor; its results are on the host if all its tensors are."""
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
        return any(tensor in self for tensor in tensors_in((*args, *kwargs.values())))

    def to_device(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with torch._C.DisableTorchFunction(), self._recorder.unseen():
            converted = tensor.detach().to(dtype)
        self.note(converted)
        with patch.object(self._recorder, "host", None):  # the copy belongs to the device
            return converted.clone()

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with torch._C.DisableTorchFunction(), self._recorder.unseen():
            arrived = tensor.detach().to(dtype, copy=True)
        self.note(tensor)
        self.add(arrived)
        return arrived

    def note(self, tensor: torch.Tensor) -> None:
        self._recorder.work.note(host_copy(tensor).fixed())

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a tensor as pinned in place of the copy that CUDA would make: DeepSpeed drops the original."""
        self._recorder.pinned.take(tensor.untyped_storage(), int(tensor.nbytes))
        self._recorder.disown(tensor)  # it was made without a device argument, and so recorded
        self.add(tensor)
        self._storages[tensor.untyped_storage()]()
        return tensor


class _Devices(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped to mypy here
    """Tracks whether tensors are created on, and moved to, the device or the host."""

    def __init__(self, recorder: RankRecorder, host: HostTensors) -> None:
        super().__init__()
        self._recorder, self._host = recorder, host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE_OF:
            return _HOST if args[0] in self._host else func(*args)
        if func is TO or func is CPU:
            tensor, given = args[0], (*args[1:], kwargs.get("device"), kwargs.get("dtype"))
            target = next((each for each in given if isinstance(each, (str, torch.device))), None)
            target = _HOST if func is CPU else target
            dtype = next((each for each in given if isinstance(each, torch.dtype)), tensor.dtype)
            leaves = _is_host(target)
            if target is not None and str(target) == "cpu" and leaves is (tensor not in self._host):  # not ``meta``
                return self._host.to_host(tensor, dtype) if leaves else self._host.to_device(tensor, dtype)
        elif _is_host(kwargs.get("device")):
            with self._recorder.unseen():
                return self._host.add(func(*args, **kwargs))
        return func(*args, **kwargs)


def _is_host(place: Any) -> bool:
    return isinstance(place, str) and not isinstance(place, DeviceName) and str(getattr(place, "value", place)) == "cpu"


@contextmanager
def zero_offload(recorder: RankRecorder) -> Iterator[HostTensors]:
    """Within the block, tensors that DeepSpeed offloads take no device memory."""
    host = recorder.host = HostTensors(recorder)
    with ExitStack() as stack:
        stack.enter_context(patch.object(cpu_adam, "CPUAdamBuilder", lambda: SimpleNamespace(load=HostAdam)))
        stack.enter_context(patch.object(torch.Tensor, "is_pinned", lambda tensor, *_: tensor in host))
        stack.enter_context(_Devices(recorder, host))
        yield host


class HostAdam:
    """Replaces ``csrc/adam/cpu_adam_impl.cpp``, which updates host tensors and would be compiled at first use."""

    def create_adam(self, *_: Any) -> int:
        return 0

    destroy_adam = create_adam

    def adam_update(self, *given: Any) -> int:
        """Updates real tensors in place by torch's AdamW, whose last digits can differ from those of DeepSpeed's."""
        _, step, rate, beta1, beta2, eps, weight_decay, _, *tensors = given  # of an Adam's number and bias_correction
        if isinstance(tensors[0], FakeTensor):
            return 0
        settings = {"lr": rate, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            lists = ([each] for each in tensors)  # parameter, gradient, and averages of the gradient and its square
            steps = [torch.tensor(float(step))]
            torch._fused_adamw_(*lists, [], steps, **settings, amsgrad=False, maximize=False)
        return 0
