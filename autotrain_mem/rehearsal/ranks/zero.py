"""Runs DeepSpeed's engine on CPU tensors as on a GPU, with an accelerator that behaves like CUDA's.

DeepSpeed gets devices and streams from its accelerator (``deepspeed/accelerator/``).
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["DS_BUILD_OPS"] = "0"

import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.comm import comm
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.sequence_parallel import parallel_state_sp, ulysses_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
from deepspeed.runtime.zero import partition_parameters, stage3
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.sequence import layer
from deepspeed.utils import groups
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from autotrain_mem.rehearsal.cuda.host_offload import Streams
from autotrain_mem.rehearsal.ranks.recording import RankRecorder, run_unseen, wrapped
from autotrain_mem.rehearsal.ranks.zero_offload import DeviceName, HostTensors, zero_offload
from autotrain_mem.rehearsal.trace.operator_costs import host_step
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.settings.own import OF_DEEPSPEED
from autotrain_mem.trainers.weightless import IN_SHARDS
from autotrain_mem.types import Knobs, Owner

_ROOM_BYTES = sys.maxsize
"""The free memory reported to DeepSpeed, which would flatten weights on the host if a copy did not fit."""


class _Accelerator(CPU_Accelerator):  # type: ignore[misc]  # DeepSpeed is untyped
    """Behaves like CUDA's accelerator, except that its devices are named ``cpu``."""

    Event = Streams.Event

    def __init__(self, recorder: RankRecorder, host: HostTensors | None) -> None:
        super().__init__()
        self._recorder, self._streams, self._host = recorder, Streams(recorder), host
        self.stream, self.default_stream = self._streams.stream, self._streams.default_stream
        self.current_stream = self._streams.current_stream

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: Any = None) -> str:
        return DeviceName("cpu")

    current_device_name = device_name

    def pin_memory(self, tensor: Any, align_bytes: int = 1) -> Any:
        return tensor if self._host is None else self._host.pin(tensor)

    def available_memory(self, device_index: Any = None) -> int:
        return _ROOM_BYTES

    def empty_cache(self) -> None:
        self._recorder.empty_cache()

    def is_fp16_supported(self) -> bool:
        return True

    @property
    def Stream(self) -> Any:  # CUDA's own name
        return self._streams.Stream


@contextmanager
def fresh_deepspeed() -> Iterator[None]:
    """Within the block, DeepSpeed's globals hold no groups or models of earlier runs."""
    with ExitStack() as stack:
        for module in (comm, groups, partition_parameters):
            stack.enter_context(patch.dict(vars(module)))
        # DeepSpeed would compile and use its reduction kernel for CPUs.
        stack.enter_context(patch("deepspeed.comm.torch.build_shm_op", lambda: None))
        stack.callback(unset_hf_deepspeed_config)
        yield


@contextmanager
def zero_rules(recorder: RankRecorder, knobs: Knobs, *, is_fake: bool) -> Iterator[None]:
    """Within the block, DeepSpeed trains as on GPUs. ``is_fake`` means a group whose collectives do nothing."""

    def find_no_overflow(check: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        """Reports no overflow: DeepSpeed would take an unknown value for an overflow and skip the step."""
        check(*args, **kwargs)
        return False

    with ExitStack() as stack:
        offloads = any(getattr(knobs, name) for name in OF_DEEPSPEED)
        host = stack.enter_context(zero_offload(recorder)) if offloads else None
        stack.enter_context(patch.object(real_accelerator, "ds_accelerator", _Accelerator(recorder, host)))
        on_host = knobs.offload_optimizer_device is not None
        stack.enter_context(wrapped(DeepSpeedEngine, "_configure_optimizer", _configure_optimizer, recorder, on_host))
        stack.enter_context(wrapped(DeepSpeedEngine, "_configure_distributed_model", _configure_model, recorder))
        stack.enter_context(wrapped(DeepSpeedZeRoOffload, "_convert_to_zero_parameters", _cut, recorder))
        stack.enter_context(wrapped(stage3, "defragment", _defragment, recorder))
        if is_fake:  # a fake group has no other ranks to compare with
            alone = SimpleNamespace(get_rank=lambda: 0, broadcast=zero_utils.dist.broadcast)
            stack.enter_context(patch.object(zero_utils, "dist", alone))
            for kind in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
                stack.enter_context(wrapped(kind, "has_overflow", find_no_overflow))
        else:  # gloo copies its input, NCCL does not
            stack.enter_context(wrapped(TorchBackend, "reduce_scatter_tensor", run_unseen, recorder))
        yield


def _configure_model(configure: Callable[..., None], recorder: RankRecorder, engine: Any, model: Any) -> None:
    """Hides the engine's cast, which is on the host, and records the whole model, unless it is already sharded."""
    for parameter in model.parameters():
        recorder.work.know_weight(parameter)
    with recorder.unseen():
        configure(engine, model)
    if not (engine.zero_optimization_partition_weights() and _is_in_shards(engine.module)):
        Recorder.adopt_model(recorder, engine.module)


def _is_in_shards(model: torch.nn.Module) -> bool:
    """Returns whether ``zero.Init`` sharded the parameters on creation (``engine.py: _configure_distributed_model``
    looks for a ``ds_id``); a rehearsal marks the model and lets the engine shard it."""
    marked = any(getattr(module, IN_SHARDS, False) for module in model.modules())
    return marked or any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def _cut(cut: Callable[..., None], recorder: RankRecorder, offload: Any, config: Any, module: Any, mpu: Any) -> None:
    """Shards a model's parameters for ZeRO-3. Shards that ``zero.Init`` creates exist before recording starts.
    Otherwise shards replace the parameters one by one."""
    with recorder.unseen() if _is_in_shards(module) else nullcontext():
        cut(offload, config, module, mpu)
    if _is_in_shards(module):
        # ``zero.Init`` numbers parameters on creation, so an adapter's come last, and parameters that are fetched
        # together are fetched in that order (``partition_parameters.py: Init``, ``all_gather_coalesced``).
        parameters = [parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")]
        numbers = sorted(parameter.ds_id for parameter in parameters)
        in_order = sorted(parameters, key=lambda parameter: (parameter.requires_grad, parameter.ds_id))
        for parameter, number in zip(in_order, numbers, strict=True):
            parameter.ds_id = number
        if recorder.host is not None and any(getattr(each, IN_SHARDS, False) for each in module.modules()):
            # ``zero.Init`` also pins a shard of a tied weight until the model ties it; its block stays cached after
            # that (``partition_parameters.py: InsertPostInitMethodToModuleSubClasses, Init._post_init_method``).
            uses = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
            for parameter, count in uses.items():
                for _ in range(count - 1):
                    recorder.pinned.take(torch.Tensor(), parameter.ds_tensor.nbytes)
    recorder.name_modules(module)
    for name, parameter in module.named_parameters():
        if recorder.host is None or parameter.ds_tensor not in recorder.host:
            recorder.mark(parameter.ds_tensor, Owner.WEIGHTS, name)
    for name, buffer in module.named_buffers():
        recorder.mark(buffer, Owner.WEIGHTS, name)


def _defragment(defragment: Callable[..., Any], recorder: RankRecorder, shards: list[torch.Tensor]) -> Any:
    """Records the one buffer into which ``zero/utils.py: defragment`` joins shards, by way of the host."""
    buffer = run_unseen(defragment, recorder, shards)
    recorder.mark(buffer, Owner.WEIGHTS, "flat_weights")
    return buffer


def _configure_optimizer(
    configure: Callable[..., None], recorder: RankRecorder, on_host: bool, engine: Any, *args: Any
) -> None:
    """Counts the flat float32 copy of the weights, which the optimizer updates, as its state."""
    configure(engine, *args)
    for group in getattr(engine.optimizer, "bit16_groups_flat", ()):
        recorder.mark(group, Owner.WEIGHTS, "flat_weights")
    if (shards := getattr(engine.optimizer, "lp_param_buffer", None)) is not None:
        recorder.mark(shards, Owner.WEIGHTS, "flat_weights")
    inner = engine.optimizer.optimizer
    flat = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)
    if on_host:

        def stepped(*_: Any) -> None:
            """Counts one call of the optimizer: ZeRO-3 calls it once for each subgroup of the flat shards."""
            parts = [each for group in inner.param_groups for each in group["params"] if each.grad is not None]
            recorder.count_step(host_step(parts, fused=True)[1:])  # the copies are counted as they are made

        inner.register_step_post_hook(stepped)
        return
    for tensor in flat or [each for group in inner.param_groups for each in group["params"]]:
        recorder.mark(tensor, Owner.OPTIMIZER_STATE, "master_weights")


@contextmanager
def shared_sequences(recorder: RankRecorder, *, is_fake: bool) -> Iterator[None]:
    """Within the block, DeepSpeed's Ulysses runs unchanged, and its globals are restored afterwards.

    Processes that share rows gather them, take one part each, and exchange tokens for heads around attention
    (``deepspeed/runtime/sequence_parallel/ulysses_sp.py``).
    """
    with ExitStack() as stack:
        stack.enter_context(patch.dict(vars(parallel_state_sp)))
        stack.enter_context(patch.dict(layer._all_to_all_groups))
        # DeepSpeed replaces the registered attention function.
        stack.enter_context(patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping))
        stack.enter_context(wrapped(UlyssesSPDataLoaderAdapter, "refill", _refill, recorder))
        stack.enter_context(wrapped(UlyssesSPDataLoaderAdapter, "__next__", _next, recorder))
        if not is_fake:
            stack.enter_context(patch.object(ulysses_sp, "dist", _Uneven()))
        yield


class _Uneven:
    """Wraps DeepSpeed's collectives. Rows of different lengths, which gloo rejects, are gathered by broadcasts, as NCCL
    does (``torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: ProcessGroupNCCL::allgather``)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(comm, name)

    def all_gather(self, tensors: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
        if all(tensor.shape == own.shape for tensor in tensors):
            comm.all_gather(tensors, own, group=group)
            return
        tensors[comm.get_rank(group)].copy_(own)
        for rank, tensor in enumerate(tensors):
            comm.broadcast(tensor, comm.get_global_rank(group, rank), group=group)


def _refill(refill: Callable[[Any], None], recorder: RankRecorder, loader: Any) -> None:
    """Copies the micro-batches of ``refill``: its ``.cpu()`` makes copies on a GPU, but on the CPU it returns views."""
    refill(loader)
    with recorder.unseen():
        for batch in loader.micro_batches:
            batch.update({name: _copy(value) for name, value in batch.items()})


def _next(following: Callable[[Any], dict[str, Any]], recorder: RankRecorder, loader: Any) -> dict[str, Any]:
    """Counts a batch on the device as soon as it is drawn, a few micro-steps before the trainer moves it there
    (``transformers/trainer.py: _prepare_inputs``). The difference is small, since ids and labels are small."""
    batch = {name: _copy(value) for name, value in following(loader).items()}
    recorder.adopt_batch(value for value in batch.values() if isinstance(value, torch.Tensor))
    return batch


def _copy(value: Any) -> Any:
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value
