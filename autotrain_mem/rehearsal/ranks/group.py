"""Makes this process one of several for torch.distributed and accelerate, on CPU tensors that stand for a GPU's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from autotrain_mem.parallel.launch_environment import rank_environment

_FAKE = "fake"
"""A group whose collectives do nothing (``torch/testing/_internal/distributed/fake_pg.py``)."""
_WITHOUT_DEVICE_IDS = {"ACCELERATE_BYPASS_DEVICE_MAP": "true"}
"""DDP takes ids of devices for a GPU's tensors only (``accelerate/accelerator.py: prepare_model``)."""


@contextmanager
def fake_group(rank: int, processes: int, devices: int, launch: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process is one of several that are not there; nothing is sent, and nobody is waited for.

    Args:
        devices: Processes of one node.
        launch: What accelerate says to each process (``parallel.environment.launch_environment``).
    """
    ours = rank_environment(rank, processes, address="127.0.0.1", port=1)
    ours |= {"LOCAL_RANK": str(rank % devices), "LOCAL_WORLD_SIZE": str(devices)}
    with patch.dict(os.environ, {**launch, **ours}):
        dist.init_process_group(_FAKE, rank=rank, world_size=processes, store=FakeStore())
        try:
            with on_gpus(), _alone_with_objects():
                yield
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it holds meshes, whose groups are gone, and another's is equal to them


@contextmanager
def _alone_with_objects() -> Iterator[None]:
    """Inside, every other process has this one's objects, and its own tensors where one is to be sent to all.

    torch sends objects as the bytes of tensors, which a group that is not there would leave empty
    (``torch/distributed/distributed_c10d.py: all_gather_object``).
    """

    def all_gather_object(objects: list[Any], own: Any, group: Any = None) -> None:
        objects[:] = [own] * len(objects)

    def gather_object(own: Any, objects: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        if objects is not None:
            objects[:] = [own] * len(objects)

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    prepare = Accelerator.prepare_data_loader

    def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # it draws a seed, which is a value
            return prepare(*args, **kwargs)

    init_mesh = DeviceMesh.__init__

    def init_real_mesh(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():  # it finds a process by values
            if isinstance(kwargs.get("_rank_map"), FakeTensor):  # that of ``init_device_mesh``: all ranks in order
                kwargs["_rank_map"] = torch.arange(kwargs["_layout"].numel(), dtype=torch.int)
            init_mesh(*args, **kwargs)

    instead = {"all_gather_object": all_gather_object, "gather_object": gather_object}
    instead |= dict.fromkeys(("broadcast_object_list", "broadcast", "barrier"), nothing)
    with ExitStack() as stack:
        for name, function in instead.items():
            stack.enter_context(patch.object(dist, name, function))
        stack.enter_context(patch.object(Accelerator, "prepare_data_loader", prepare_data_loader))
        stack.enter_context(patch.object(DeviceMesh, "__init__", init_real_mesh))
        yield


@contextmanager
def real_group() -> Iterator[None]:
    """Inside, this process talks to the others through gloo; its environment says which of them it is.

    accelerate would make no group for a trainer that is told to use the CPU (``state.py: PartialState.__init__``).
    """
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def on_gpus() -> Iterator[None]:
    """Inside, accelerate takes the CPU for the GPU of a process of several, whatever backend they talk through."""
    AcceleratorState._reset_state(reset_partial_state=True)

    def backend(state: Any, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
        return dist.get_backend() if dist.is_initialized() else "gloo", DistributedType.MULTI_GPU

    def set_device(state: Any) -> None:
        state.device = torch.device("cpu")

    start = PartialState.__init__

    def init(state: Any, cpu: bool = False, **options: Any) -> None:
        start(state, **options)  # told of a CPU it would not look for DeepSpeed

    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, _WITHOUT_DEVICE_IDS))
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            from autotrain_mem.rehearsal.ranks.zero import fresh_deepspeed  # DeepSpeed takes seconds to import

            stack.enter_context(patch.object(PartialState, "__init__", init))
            stack.enter_context(fresh_deepspeed())
        stack.enter_context(patch.object(PartialState, "_prepare_backend", backend))
        stack.enter_context(patch.object(PartialState, "set_device", set_device))
        stack.callback(AcceleratorState._reset_state, reset_partial_state=True)
        yield
