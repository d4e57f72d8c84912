"""FSDP2's CPU offload where CPU tensors play the GPU's: shards, their gradients and the optimizer lie on the host.

A gathered layer's shards are copied to the GPU first (``_fsdp_param.py: all_gather_inputs``), its reduced gradients are
copied back (``_fsdp_collectives.py: foreach_reduce``), and clipping and the optimizer's step run on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import _to_dtype_if_needed
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor

from autotrain_mem.rehearsal.ranks.recording import RankRecorder, local
from autotrain_mem.rehearsal.trace.operator_costs import Cost
from autotrain_mem.types import Phase
from autotrain_mem.types.work import Kind


@contextmanager
def fsdp2_offload(recorder: RankRecorder) -> Iterator[None]:
    """Inside, what FSDP2 offloads is not on the device."""
    enter = recorder.enter_phase
    inputs = FSDPParam.all_gather_inputs.fget
    reduce = _fsdp_param_group.foreach_reduce

    def all_gather_inputs(param: Any) -> list[torch.Tensor]:
        if not param.offload_to_cpu or param.sharded_state != ShardedState.SHARDED:
            found: list[torch.Tensor] = inputs(param)
            return found
        shard = param._sharded_param_data
        _note(recorder, Kind.OVERLAPPED_COPY, shard)
        return [_to_dtype_if_needed(shard.clone(), param.param_dtype)]

    def foreach_reduce(fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
        result = reduce(fsdp_params, *args, **kwargs)
        for param in fsdp_params:
            if param.offload_to_cpu and param.sharded_param.grad is not None:
                _to_host(recorder, param.sharded_param.grad)
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


def _to_host(recorder: RankRecorder, gradient: DTensor) -> None:
    """A gradient that has just come from the device, as a view of all that a unit reduced."""
    shard = local(gradient)
    if recorder.is_host(shard):
        return
    _note(recorder, Kind.OVERLAPPED_COPY, shard)
    with recorder.unseen():
        gradient._local_tensor = shard.clone()
    recorder.disown(gradient._local_tensor)


def _note(recorder: RankRecorder, kind: Kind, tensor: torch.Tensor) -> None:
    recorder.work.note(Cost(kind=kind, fixed_bytes=int(tensor.nbytes), launches=1))
