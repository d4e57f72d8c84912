"""Counts what a process sends to others, and says what it would get from them: what it has itself.

All ranks of a rehearsal train on the same worst batch, so that what is gathered is this process's own, as many times as
there are processes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from autotrain_mem.rehearsal.known_values import know, known_value, real_tensors, tensors_in
from autotrain_mem.rehearsal.trace.operator_costs import Cost
from autotrain_mem.types.work import Kind

if TYPE_CHECKING:
    from autotrain_mem.rehearsal.ranks.recording import RankRecorder

_ROUNDS = {"allreduce_": 2, "allreduce_coalesced_": 2}
"""How often all bytes go around; an all-reduce is a reduce-scatter and an all-gather (nccl-tests, PERFORMANCE.md)."""
_EXCHANGE = "dim_zero_all_to_all"
"""DeepSpeed's own operator (``deepspeed/sequence/layer.py``): each process keeps its own part of what it exchanges."""
_OF_TOKENS = ("all_to_all_single", _EXCHANGE)
"""Ring attention's, in which keys, values and their gradients go from each process to the next, and Ulysses', in which
each process gets a share of the heads for a share of the tokens: they grow with the tokens."""
_TO_ALL = ("broadcast_", "send", "recv_", "scatter_", "all_to_all_single")
"""Each byte is sent once, whatever the number of processes."""
_GATHERS = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_")
_REDUCES = ("allreduce_", "allreduce_coalesced_")
_SUM = int(dist.ReduceOp.SUM)


class Collectives:
    """Runs collectives for a recorder.

    Args:
        devices: Processes of one node: a group of more, or one that spans nodes, goes over the network.
        is_fake: Nobody is there: results are made up.
    """

    NAMESPACES = ("c10d", "_c10d_functional", "deepspeed")

    def __init__(self, devices: int, *, is_fake: bool) -> None:
        self._devices, self._is_fake = devices, is_fake
        self._sent: dict[int, torch.Tensor] = {}
        """What is being sent lives until what comes in its place is waited for (``torch/csrc/distributed/c10d/
        ProcessGroupNCCL.hpp: WorkNCCL::stashed_for_allocator_safety_``), by the storage that it comes in."""

    def run(self, recorder: RankRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one collective, counted, with the values that it brings.

        DDP reduces gradients in the last micro-step of each optimizer step (``accelerate/accelerator.py: no_sync``).
        """
        if (cost := self._cost(func, args)) is not None:
            recorder.work.note(replace(cost, of_step=_name(func) in _REDUCES and not recorder.shards))
        if not self._is_fake:
            return recorder.see(func, args, kwargs)
        if _name(func) == "wait_tensor":
            self._sent.pop(args[0].untyped_storage()._cdata, None)
            return args[0]  # as torch/csrc/distributed/c10d/Functional.cpp does, where its meta kernel makes another
        out = func(*args, **kwargs)
        recorder.see_result(out)
        if _name(func) == "all_to_all_single":
            self._sent[out.untyped_storage()._cdata] = args[0]
        _bring(func, args)
        return out

    def note(self, recorder: RankRecorder, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Count a reduce-scatter of this tensor."""
        recorder.work.note(self._cost_of(_bytes(tensor), group, 1, name=""))

    def _cost(self, func: Any, args: tuple[Any, ...]) -> Cost | None:
        name, group = _name(func), _group(args)
        if group is None or group.size() < 2 or name == "barrier":
            return None
        largest = max((_bytes(each) for each in args), default=0)
        cost = self._cost_of(largest, group, _ROUNDS.get(name, 1), name=name)
        return replace(cost, bytes=cost.fixed_bytes, fixed_bytes=0) if name in _OF_TOKENS else cost

    def _cost_of(self, size_bytes: int, group: dist.ProcessGroup, rounds: int, *, name: str) -> Cost:
        share = 1.0 if name in _TO_ALL else rounds * (group.size() - 1) / group.size()
        kind = Kind.NETWORK_COLLECTIVE if self._spans_nodes(group) else Kind.COLLECTIVE
        return Cost(kind=kind, fixed_bytes=round(size_bytes * share))

    def _spans_nodes(self, group: dist.ProcessGroup) -> bool:
        return len({rank // self._devices for rank in dist.get_process_group_ranks(group)}) > 1


def _name(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:
                continue
    # Functional ones end with a group's name (``torch/csrc/distributed/c10d/Functional.cpp``).
    return dist.distributed_c10d._resolve_process_group(args[-1]) if args and isinstance(args[-1], str) else None


def _bytes(arg: Any) -> int:
    if isinstance(arg, torch.Tensor):
        return int(arg.nbytes)
    return sum(map(_bytes, arg)) if isinstance(arg, (list, tuple)) else 0


def _bring(func: Any, args: tuple[Any, ...]) -> None:
    """Give results the values that all processes alike would bring; what is written else is not known any more."""
    name = _name(func)
    if name in _GATHERS:
        outs, ins = [*tensors_in([args[0]])], [*tensors_in([args[1]])]
        value = known_value(ins[0]) if len(ins) == 1 else None
        for out in outs:
            _hold(out, value)
    elif name in _REDUCES:
        group = _group(args)
        for tensor in tensors_in([args[0]]):
            value = known_value(tensor)
            if value is not None and group is not None and _is_sum(args):
                with real_tensors():
                    value.mul_(group.size()) if value.dtype is not torch.bool else value
    elif name not in ("broadcast_", _EXCHANGE):
        for tensor in tensors_in(args[:1]):
            _hold(tensor, None)


def _is_sum(args: tuple[Any, ...]) -> bool:
    reduction = next((arg for arg in args[2:] if isinstance(arg, torch.ScriptObject)), None)
    return reduction is None or "SUM" in str(getattr(reduction, "op", "SUM")).upper()


def _hold(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
    if value is not None:
        with real_tensors():
            repeats = max(1, tensor.numel() // max(1, value.numel()))
            know(tensor, value.flatten().repeat(repeats).reshape(tensor.shape).to(tensor.dtype))
    elif (known := tensor.__dict__.get("known")) is not None:
        known.valid[0] = False
