"""DeepSpeed's files on an NVMe disk without its compiled reader and writer, which needs libaio.

What is read arrives in buffers on the host, as what is written leaves them: ``deepspeed/runtime/swap_tensor/``.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime.swap_tensor import (
    partitioned_optimizer_swapper,
    partitioned_param_swapper,
    pipelined_optimizer_swapper,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from autotrain_mem.rehearsal.ranks.recording import RankRecorder
from autotrain_mem.rehearsal.ranks.zero_offload import HostTensors

_SWAPPERS = (partitioned_optimizer_swapper, partitioned_param_swapper, pipelined_optimizer_swapper)


class _Handle:
    """Reads and writes at once what ``csrc/aio/py_lib/deepspeed_py_aio_handle.cpp`` does by and by.

    Args:
        sizes: Bytes of each file, for which it writes down what it wrote.
    """

    def __init__(self, recorder: RankRecorder, host: HostTensors, sizes: dict[str, int]) -> None:
        self._recorder, self._host, self._sizes = recorder, host, sizes
        self._asked = 0

    def new_cpu_locked_tensor(self, elements: int, like: torch.Tensor) -> torch.Tensor:
        """Make a buffer, as large as it is asked for (``csrc/pin_memory``: posix_memalign, and no power of two)."""
        with self._recorder.unseen():
            buffer: torch.Tensor = self._host.add(torch.zeros(int(elements), dtype=like.dtype))
        self._host.locked.add(buffer.untyped_storage())
        return buffer

    def free_cpu_locked_tensor(self, buffer: torch.Tensor) -> bool:
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage() in self._host.locked

    def async_pwrite(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        self._sizes[path] = max(self._sizes.get(path, 0), int(tensor.nbytes))
        self._asked += 1
        if not isinstance(tensor, FakeTensor):
            with _real():
                pathlib.Path(path).write_bytes(tensor.detach().view(torch.uint8).numpy().tobytes())
        return 0

    def async_pread(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        self._asked += 1
        if not isinstance(tensor, FakeTensor):
            with _real():
                read = torch.frombuffer(bytearray(pathlib.Path(path).read_bytes()), dtype=torch.uint8)
                tensor.detach().view(torch.uint8).copy_(read)
        return 0

    def wait(self) -> int:
        """Return how much was asked for since the last time."""
        done, self._asked = self._asked, 0
        return done


@contextmanager
def _real() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


@contextmanager
def zero_nvme(recorder: RankRecorder, host: HostTensors) -> Iterator[None]:
    """Inside, DeepSpeed's swappers have files without libaio; a rehearsal has none at all."""

    def aio_handle(**_: Any) -> _Handle:
        return _Handle(recorder, host, recorder.files)

    builder = SimpleNamespace(load=lambda verbose=False: SimpleNamespace(aio_handle=aio_handle))
    with ExitStack() as stack:
        for module in _SWAPPERS:
            stack.enter_context(patch.object(module, "AsyncIOBuilder", lambda: builder))
        yield
