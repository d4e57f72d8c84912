"""Offloads activations and optimizer state to the host in a rehearsal, whose CPU tensors represent a GPU's.

TRL's own class (``trl/models/activation_offloading.py: OffloadActivations``) decides which tensors leave the device and
how long they stay; only its calls to torch are replaced. Tensors in pinned memory are not on the device.
Copies back, and contiguous copies before offloading, are allocated on TRL's copy stream, the only other stream that
allocates during training on one GPU. ``settings.levers`` lists what a rehearsal cannot predict.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import modeling_utils
from trl.models import activation_offloading

from autotrain_mem.rehearsal.cuda.rules import CudaRule
from autotrain_mem.rehearsal.known_values import Known, known_value
from autotrain_mem.rehearsal.trace.ledger import PinnedMemory
from autotrain_mem.rehearsal.trace.operator_costs import host_copy
from autotrain_mem.rehearsal.trace.recorder import Recorder, note
from autotrain_mem.trainers import host_optimizer
from autotrain_mem.types.work import Kind


@contextmanager
def host_offloading(recorder: Recorder) -> Iterator[None]:
    """Within the block, TRL's ``activation_offloading`` and our ``optimizer_offload`` treat CPU tensors as a GPU's.
    The trainer must be built within the block, since TRL queries the accelerator at that time."""

    def record_stream(tensor: torch.Tensor, stream: _Stream) -> None:
        recorder.record_stream(tensor, stream.number)

    def save_on_cpu(**options: Any) -> Any:
        """Replaces ``torch/autograd/graph.py: save_on_cpu``, which transformers uses if
        ``gradient_checkpointing_kwargs`` has ``offload`` (``modeling_utils.py: _activation_checkpointing_enable``).
        Copies run on the compute stream."""

        def pack(tensor: torch.Tensor) -> _OnHost:
            packed = _OnHost(recorder.pinned, Kind.COPY)
            packed.copy_(tensor, non_blocking=True)
            return packed

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.to("cuda", non_blocking=True))

    def offload_activations(**options: Any) -> Any:
        """Returns TRL's own context, changed to treat every saved tensor as on a GPU."""
        context = _OffloadActivations(**options)
        pack, unpack, learn = context.pack_hook, context.unpack_hook, context.update_model_params
        context.pack_hook = lambda tensor: pack(_OnDevice(tensor))
        context.unpack_hook = lambda number: _bare(unpack(number))
        context.update_model_params = lambda model: learn(
            SimpleNamespace(parameters=lambda: map(_OnDevice, model.parameters()))
        )
        return context

    def on_unseen_host(work: Callable[[], None]) -> None:
        """Replaces ``host_optimizer.on_host``: runs the work unrecorded; with fake tensors, does nothing."""
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            with torch._C._DisableTorchDispatch():
                work()

    with (
        patch.object(activation_offloading, "torch", _TorchWithAccelerator(recorder)),
        patch.object(activation_offloading, "OffloadActivations", offload_activations),
        patch.object(torch.Tensor, "record_stream", record_stream),
        patch.object(host_optimizer, "on_host", on_unseen_host),
        patch.object(modeling_utils, "save_on_cpu", save_on_cpu, create=True),  # transformers has it since 5.20
    ):
        yield


_OffloadActivations = activation_offloading.OffloadActivations


class _OnDevice:
    """Wraps a tensor, and reports a CUDA device and a :class:`_Storage`."""

    device = torch.device("cuda")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property  # type: ignore[misc]  # TRL calls isinstance(..., torch.nn.Parameter)
    def __class__(self) -> Any:
        return type(self.tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def untyped_storage(self) -> "_Storage":
        return _Storage(self.tensor.untyped_storage())


class _Storage:
    """A storage with a unique address, by which TRL recognises a storage that it has just offloaded. Fake storages all
    have address 0. A real address may be reused, as on a GPU."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage

    def data_ptr(self) -> int:
        """Returns an address far from all others, to which TRL adds a view's offset."""
        return _NUMBERS.setdefault(self._storage, next(_NUMBER)) << 64

    def size(self) -> Any:
        return self._storage.size()


_NUMBER = itertools.count(1)
_NUMBERS: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()


def _bare(tensor: Any) -> torch.Tensor:
    return tensor.tensor if type(tensor) is _OnDevice else tensor


class _OnHost:
    """A tensor in pinned memory, with the methods that TRL calls."""

    def __init__(self, pinned: PinnedMemory, kind: Kind = Kind.OVERLAPPED_COPY) -> None:
        self._pinned, self._kind = pinned, kind

    def copy_(self, source: Any, non_blocking: bool) -> None:
        """Copies a contiguous tensor, with its values if they are known."""
        source = _bare(source)
        self._pinned.take(self, source.nbytes)
        note(host_copy(source, self._kind))
        self._shape, self._dtype = source.shape, source.dtype
        self._values = known_value(source) if isinstance(source, FakeTensor) else source
        if self._values is not None:
            with torch._C._DisableTorchDispatch():
                self._values = self._values.detach().clone()

    def to(self, device: str, non_blocking: bool) -> torch.Tensor:
        back = torch.empty(self._shape, dtype=self._dtype)
        note(host_copy(back, self._kind))
        if self._values is None:
            return back
        if isinstance(back, FakeTensor):
            back.known = Known(self._values, [True])
        else:
            with torch._C._DisableTorchDispatch():
                back.copy_(self._values)
        return back


class _Stream:
    """Imitates a finished stream or event. FSDP2 and TRL hold tensors in use until they wait: none is freed early."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def record(self, *_: Any) -> "_Stream":
        return self

    record_event = record

    def wait(self, *_: Any) -> None: ...

    wait_event = wait_stream = synchronize = wait

    def query(self) -> bool:
        return True


class Streams:
    """Replaces ``torch.cuda`` as the module of the device, with streams on which blocks are allocated."""

    Event = _Stream

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._streams = recorder, 0
        self._now = self._default = _Stream()

    def Stream(self, *_: Any, **__: Any) -> _Stream:  # torch's own name
        self._streams += 1
        return _Stream(self._streams)

    def default_stream(self, *_: Any) -> _Stream:
        return self._default

    def current_stream(self, *_: Any) -> _Stream:
        return self._now

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        """Within the block, tensors are allocated on this stream."""
        before, self._now = self._now, stream
        try:
            with self._recorder.on_stream(stream.number):
                yield
        finally:
            self._now = before

    def current_device(self) -> Any:
        return 0

    def synchronize(self, *_: Any) -> None: ...

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()  # which is patched

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


class _TorchWithAccelerator:
    """Replaces the name ``torch`` in TRL's module."""

    accelerator = SimpleNamespace(current_accelerator=lambda: _OnDevice.device)

    def __init__(self, recorder: Recorder) -> None:
        self._pinned, self.cuda = recorder.pinned, Streams(recorder)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def get_device_module(self, device: str) -> Any:
        return self.cuda

    def empty(self, *size: Any, **options: Any) -> _OnHost:
        return _OnHost(self._pinned)

    empty_like = empty

    def as_strided(self, tensor: Any, **view: Any) -> torch.Tensor:
        return torch.as_strided(_bare(tensor), **view)


RULES = (CudaRule(lambda recorder, card: host_offloading(recorder)),)
