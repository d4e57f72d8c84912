"""Runs FSDP2 on CPU tensors in place of GPU tensors: replaces its streams, and records which shards are on the device.

FSDP2 holds a reference to every buffer in use (``torch/distributed/fsdp/_fully_shard/``). So prefetched buffers and
buffers that are not yet reduced are recorded correctly, as long as blocks are allocated on FSDP2's streams.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import fsdp
from torch.distributed.fsdp import _fully_shard as package
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_init,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
    _fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import _to_dtype_if_needed
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from autotrain_mem.rehearsal.cuda.host_offload import Streams
from autotrain_mem.rehearsal.ranks.invariants import check_shards
from autotrain_mem.rehearsal.ranks.recording import RankRecorder, local, run_unseen, wrapped
from autotrain_mem.rehearsal.trace.operator_costs import host_copy
from autotrain_mem.trainers.model_support import statistics
from autotrain_mem.types import Owner, Phase

_MODULES = (_fsdp_collectives, _fsdp_init, _fsdp_param, _fsdp_param_group, _fsdp_state, _fully_shard, package)


@contextmanager
def fsdp2_rules(recorder: RankRecorder, shards: int) -> Iterator[None]:
    """Within the block, FSDP2 shards models as on GPUs, each over ``shards`` processes."""
    streams = Streams(recorder)
    with ExitStack() as stack:
        for module in _MODULES:
            if hasattr(module, "_get_device_handle"):
                stack.enter_context(patch.object(module, "_get_device_handle", lambda *_: streams))
        stack.enter_context(patch.object(torch.accelerator, "current_stream", streams.current_stream))
        # DTensor runs an operator to determine the result's global shape; this allocates nothing on the device.
        stack.enter_context(wrapped(ShardingPropagator, "_propagate_tensor_meta_non_cached", run_unseen, recorder))
        stack.enter_context(wrapped(_fsdp_collectives.DefaultReduceScatter, "__call__", _reduce_scatter, recorder))
        stack.enter_context(wrapped(Accelerator, "_prepare_fsdp2", _prepare, recorder, shards))
        # TRL shards a reference model itself (``trl/models/utils.py: prepare_fsdp``), as a single unit.
        stack.enter_context(wrapped(fsdp, "fully_shard", run_unseen, recorder))
        stack.enter_context(wrapped(FSDPParam, "reset_sharded_param", _reset_sharded_param))
        stack.enter_context(wrapped(FSDPParam, "alloc_all_gather_outputs", _allocate_outputs, recorder))
        stack.enter_context(wrapped(_fsdp_param_group, "foreach_all_gather", _gather, recorder))
        for name in ("foreach_all_gather_copy_out", "foreach_reduce"):
            stack.enter_context(wrapped(_fsdp_param_group, name, _count_as_weights, recorder))
        stack.enter_context(patch.object(_fsdp_param, "_chunk_with_empty", Chunks))
        if find_spec("bitsandbytes") is not None:
            from bitsandbytes.nn import modules

            def keep_quant_state(module: Any) -> None:
                """Replaces bitsandbytes' function, which would turn a gathered weight into bitsandbytes' parameter
                class. That takes no memory, and the class cannot wrap a fake tensor."""
                if getattr(module.weight, "quant_state", None) is None:
                    module.weight.quant_state = module.quant_state

            stack.enter_context(patch.object(modules, "fix_4bit_weight_quant_state_from_module", keep_quant_state))
        yield


class Chunks:
    """Splits a tensor lazily. A process needs only its own part and the first; torch would create the parts of all
    processes (``torch/distributed/fsdp/_fully_shard/_fsdp_common.py: _chunk_with_empty``)."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim
        self._size = math.ceil(tensor.size(dim) / num_chunks)

    def __getitem__(self, at: int) -> torch.Tensor:
        start = range(self._count)[at] * self._size
        if (left := self._tensor.size(self._dim) - start) <= 0 < start:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, left))


class Params4bit(FakeTensor):  # type: ignore[misc]  # torch is untyped to mypy here
    """A 4-bit weight with the class name that accelerate looks for (``utils/fsdp_utils.py: fsdp2_prepare_model``)."""


def _prepare(prepare: Callable[..., Any], recorder: RankRecorder, shards: int, accelerator: Any, *args: Any) -> Any:
    """Runs accelerate's casting and sharding unrecorded, as it happens on the host, and then records the shards.

    accelerate matches an optimizer's parameters by address (``accelerator.py: _prepare_fsdp2``). Fake tensors have no
    addresses, so the identity of the storage replaces them.
    """
    models = [each for each in args if isinstance(each, torch.nn.Module)]
    before = {name: parameter.numel() for each in models for name, parameter in each.named_parameters()}
    for model in models:
        for name, scales in statistics(model):  # go to the GPU with their weight, which is then sharded
            recorder.mark(scales, Owner.WEIGHTS, name)
        for parameter in model.parameters():
            recorder.work.know_weight(parameter)
            if isinstance(parameter, FakeTensor) and getattr(parameter, "quant_state", None) is not None:
                parameter.__class__ = Params4bit
    with (
        recorder.unseen(),
        patch.object(FakeTensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata, create=True),
    ):
        result = prepare(accelerator, *args)
    for model in (each for each in result if isinstance(each, torch.nn.Module)):
        check_shards(before, model, shards)
        recorder.adopt_model(model)
    return result


def _reset_sharded_param(reset: Callable[[Any], None], param: Any) -> None:
    """Resets a padded shard only if it is no longer FSDP2's own. FSDP2 compares addresses to find out
    (``_fsdp_param.py: reset_sharded_param``); fake tensors have none, so this compares storages."""
    place, own = param._module_info, param._sharded_param_data
    current = getattr(place.module, place.param_name)
    is_own = current._local_tensor.untyped_storage()._cdata == own.untyped_storage()._cdata
    if current is not param.sharded_param or not is_own:
        reset(param)


def _reduce_scatter(reduce: Callable[..., Any], recorder: RankRecorder, comm: Any, **call: Any) -> Any:
    """Counts a reduce-scatter, and hides its allocations: gloo works in a copy of the buffer, NCCL in the buffer."""
    if recorder.collectives is not None:
        recorder.collectives.note(recorder, call["input_tensor"], call["group"])
    return run_unseen(reduce, recorder, comm, **call)


def _allocate_outputs(allocate: Callable[[Any], None], recorder: RankRecorder, param: Any) -> None:
    allocate(param)
    for tensor in param.all_gather_outputs:
        recorder.mark(tensor, Owner.GATHERED_WEIGHTS, param._param_fqn or "")


def _count_as_weights(function: Callable[..., Any], recorder: RankRecorder, *args: Any, **kwargs: Any) -> Any:
    """Calls a function, and counts its bytes as a weight's: flat buffers and their slices lack a weight's shape."""
    with recorder.work.of_weights():
        return function(*args, **kwargs)


def _gather(gather: Callable[..., Any], recorder: RankRecorder, *args: Any, **kwargs: Any) -> Any:
    if (result := _count_as_weights(gather, recorder, *args, **kwargs)) is not None:
        recorder.mark(result.all_gather_output, Owner.GATHERED_WEIGHTS, "all_gather")
    return result


@contextmanager
def fsdp2_offload(recorder: RankRecorder) -> Iterator[None]:
    """Within the block, what FSDP2 offloads (shards, their gradients and the optimizer) is not on the device.

    Shards are copied to the GPU before they are gathered (``_fsdp_param.py: all_gather_inputs``). Reduced gradients are
    copied back (``_fsdp_collectives.py: foreach_reduce``). Clipping and the optimizer's step run on the host.
    """
    enter = recorder.enter_phase
    inputs = FSDPParam.all_gather_inputs.fget
    reduce = _fsdp_param_group.foreach_reduce

    def all_gather_inputs(param: Any) -> list[torch.Tensor]:
        if not param.offload_to_cpu or param.sharded_state != ShardedState.SHARDED:
            found: list[torch.Tensor] = inputs(param)
            return found
        shard = param._sharded_param_data
        recorder.work.note(host_copy(shard).fixed())
        return [_to_dtype_if_needed(shard.clone(), param.param_dtype)]

    def foreach_reduce(fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
        result = reduce(fsdp_params, *args, **kwargs)
        for param in fsdp_params:
            gradient = param.sharded_param.grad  # a view of the buffer that the whole unit reduced
            if param.offload_to_cpu and gradient is not None and not recorder.is_host(shard := local(gradient)):
                recorder.work.note(host_copy(shard).fixed())
                with recorder.unseen():
                    gradient._local_tensor = shard.clone()
                recorder.disown(gradient._local_tensor)
        return result

    def enter_phase(phase: Phase) -> None:
        enter(phase)
        recorder.is_on_host = phase is Phase.OPTIMIZER_STEP

    with ExitStack() as stack:
        stack.enter_context(patch.object(FSDPParam, "all_gather_inputs", property(all_gather_inputs)))
        stack.enter_context(patch.object(_fsdp_param_group, "foreach_reduce", foreach_reduce))
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor))
        stack.enter_context(patch.object(torch.Tensor, "is_pinned", lambda tensor, *_, **__: True))
        recorder.enter_phase = enter_phase  # type: ignore[method-assign]
        yield
