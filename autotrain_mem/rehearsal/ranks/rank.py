"""Sets up one process of several, for a rehearsal and for a simulated run."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from autotrain_mem.parallel.config import accelerate_config
from autotrain_mem.parallel.launch_environment import launch_environment, rank_environment
from autotrain_mem.rehearsal.ranks.fsdp import fsdp2_offload, fsdp2_rules
from autotrain_mem.rehearsal.ranks.recording import Collectives, RankRecorder
from autotrain_mem.rehearsal.ranks.ring_attention import ring_attention
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.types import Capability, Knobs, Owner

_LOADED_BY_ALL = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "FSDP_SYNC_MODULE_STATES": "false"}
"""A rehearsal loads no weights, so no rank needs to broadcast them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedRank:
    """Rehearses one process of several, without the others."""

    knobs: Knobs
    config: Mapping[str, Any]
    """The content of accelerate's config."""
    rank: int = 0

    @contextmanager
    def launched(self) -> Iterator[None]:
        """Within the block, this process runs as if accelerate had launched it; collectives do nothing."""
        processes = self.knobs.processes
        environment = {
            **launch_environment(self.config),
            **_LOADED_BY_ALL,
            **rank_environment(self.rank, processes, address="127.0.0.1", port=1),
            "LOCAL_RANK": str(self.rank % self._devices),
            "LOCAL_WORLD_SIZE": str(self._devices),
        }
        with patch.dict(os.environ, environment):
            dist.init_process_group(_FAKE, rank=self.rank, world_size=processes, store=FakeStore())
            try:
                with on_gpus(), _alone_with_objects():
                    yield
            finally:
                dist.destroy_process_group()
                # The cached meshes refer to destroyed groups. C++ has had a cache of its own since torch 2.10.
                DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
                getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()

    def rules(self, recorder: Recorder, compute_capability: Capability) -> AbstractContextManager[None]:
        """Within the block, DDP, FSDP2 or DeepSpeed runs without other ranks, and its collectives are recorded."""
        assert isinstance(recorder, RankRecorder)
        recorder.collectives = Collectives(self._devices, is_fake=True)
        return _sharding(recorder, self.knobs, compute_capability, is_fake=True)

    @property
    def _devices(self) -> int:
        """Returns the number of processes on one node."""
        return self.knobs.processes // int(self.config.get("num_machines") or 1)


def rehearsed_rank(
    knobs: Knobs, accelerate: Mapping[str, Any] | None = None, rank: int = 0, *, attention: str | None = None
) -> RehearsedRank | None:
    """Returns the process to rehearse; None for a single process without a group. ``accelerate`` is the user's config
    or None; ``attention`` is ``attn_implementation`` or None."""
    if not knobs.has_group:
        return None
    # Without a config, each HSDP shard group is one node.
    nodes = knobs.dp_replicate_size or 1
    config = accelerate_config(knobs, nodes=nodes, attention=attention) if accelerate is None else accelerate
    return RehearsedRank(knobs=knobs, config=config, rank=rank)


@contextmanager
def real_rank(recorder: Recorder, knobs: Knobs, compute_capability: Capability) -> Iterator[None]:
    """Within the block, this launched process trains on CPU tensors in place of GPU ones and uses gloo."""
    assert isinstance(recorder, RankRecorder)
    recorder.collectives = Collectives(knobs.processes, is_fake=False)
    # accelerate makes no group for a trainer on the CPU (state.py: PartialState.__init__).
    dist.init_process_group("gloo")
    try:
        with on_gpus(), _sharding(recorder, knobs, compute_capability, is_fake=False):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _sharding(recorder: RankRecorder, knobs: Knobs, compute_capability: Capability, *, is_fake: bool) -> Iterator[None]:
    recorder.shards, recorder.offloads = knobs.is_sharded, knobs.fsdp_offload_params
    with ExitStack() as stack:
        if knobs.zero_stage:
            # DeepSpeed takes seconds to import.
            from autotrain_mem.rehearsal.ranks.zero import shared_sequences, zero_rules

            stack.enter_context(zero_rules(recorder, knobs, is_fake=is_fake))
            if knobs.sp_size > 1:
                stack.enter_context(shared_sequences(recorder, is_fake=is_fake))
        elif not knobs.is_sharded:
            stack.enter_context(ddp_rules(recorder, is_fake=is_fake))
        else:
            stack.enter_context(fsdp2_rules(recorder, knobs.shards))
            if knobs.cp_size > 1:
                stack.enter_context(ring_attention(compute_capability))
            if knobs.fsdp_offload_params:
                stack.enter_context(fsdp2_offload(recorder))
        yield


class _KeepsBuckets:
    """Wraps the C++ reducer without ``rebuild_buckets`` (``reducer.cpp``), which reads tensor values; rebuilt buckets
    hold the same bytes."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


@contextmanager
def ddp_rules(recorder: RankRecorder, *, is_fake: bool) -> Iterator[None]:
    """Within the block, DDP accepts models on fake tensors and does not compare shapes between ranks."""
    wrap = distributed.DistributedDataParallel.__init__

    def reduce(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        dist.all_reduce(bucket.buffer())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())  # the fake group's all-reduce has no result, and the reducer waits for one
        return future

    def init(model: Any, *args: Any, **kwargs: Any) -> None:
        with recorder.owned(Owner.GRADIENTS, "ddp_buckets"):
            wrap(model, *args, **kwargs)
        if is_fake:
            model.register_comm_hook(None, lambda state, bucket: reduce(bucket))
            model.reducer = _KeepsBuckets(model.reducer)

    with (
        # The C++ code of this function reads the bytes of tensors.
        patch.object(distributed, "_verify_param_shape_across_processes", lambda *_, **__: True),
        patch.object(distributed.DistributedDataParallel, "__init__", init),
    ):
        yield


_FAKE = "fake"
"""The backend whose collectives do nothing (``torch/testing/_internal/distributed/fake_pg.py``)."""
_WITHOUT_DEVICE_IDS = {"ACCELERATE_BYPASS_DEVICE_MAP": "true"}
"""DDP accepts device ids only for tensors on a GPU (``accelerate/accelerator.py: prepare_model``)."""


@contextmanager
def _alone_with_objects() -> Iterator[None]:
    """Within the block, gathering objects returns this process's object once per process; broadcasts do nothing.

    torch sends objects as bytes of tensors, which the fake backend leaves empty
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
        with _disable_current_modes():  # the function reads a random seed
            return prepare(*args, **kwargs)

    init_mesh = DeviceMesh.__init__

    def init_real_mesh(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():  # a mesh looks up ranks by value
            if isinstance(kwargs.get("_rank_map"), FakeTensor):  # ``init_device_mesh`` passes all ranks in order
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
def on_gpus() -> Iterator[None]:
    """Within the block, accelerate treats the CPU as this process's GPU, for any backend."""
    AcceleratorState._reset_state(reset_partial_state=True)

    def backend(state: Any, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
        return dist.get_backend() if dist.is_initialized() else "gloo", DistributedType.MULTI_GPU

    def set_device(state: Any) -> None:
        state.device = torch.device("cpu")

    start = PartialState.__init__

    def init(state: Any, cpu: bool = False, **options: Any) -> None:
        start(state, **options)  # with ``cpu=True``, accelerate would ignore DeepSpeed

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
