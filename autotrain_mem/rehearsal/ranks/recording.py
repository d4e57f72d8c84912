"""Records one process of several: its parts of sharded tensors, what is on the host, and its collectives.

All ranks of a rehearsal train on the same worst batch, so a gather returns this process's own data once per process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autotrain_mem.rehearsal.known_values import know, known_value, real_tensors, tensors_in
from autotrain_mem.rehearsal.trace.operator_costs import Cost, host_step
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.types import Kind, Owner

if TYPE_CHECKING:
    from autotrain_mem.rehearsal.ranks.zero_offload import HostTensors


class RankRecorder(Recorder):
    """Records the run of one rank. Operators on DTensors are left to DTensor, which calls them again on the local
    tensors; only these are on the device. Collectives are counted, since they take part of the step's time."""

    collectives: Collectives | None = None
    shards = False
    """Whether trained models are on the host until they are sharded."""
    offloads = False
    """Whether shards are offloaded to the host."""
    host: HostTensors | None = None
    """Tracks what is on the host, if DeepSpeed offloads."""
    is_on_host = False
    """Whether current computation happens on the host."""
    _unseen = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stepped_on_host: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self._unseen or self.is_on_host:
            return self._execute(func, args, kwargs or {})
        if self.host is not None and self.host.meets(args, kwargs or {}):
            return self.host.run(func, args, kwargs or {}, self._execute)
        if self.collectives is not None and func.namespace in Collectives.NAMESPACES:
            return self.collectives.run(self, func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        return super().__torch_dispatch__(func, (), args, kwargs)

    def see_result(self, out: Any) -> None:
        """Records the result of a collective: functional collectives allocate it."""
        if isinstance(out, torch.Tensor):
            self._see(out)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Within the block, allocations are not recorded, since they are on the host; known values stay known."""
        is_recording = self in _get_current_dispatch_mode_stack()
        with patch.object(self, "_unseen", True), nullcontext() if is_recording else self:
            yield

    @contextmanager
    def owned(self, owner: Owner, name: str) -> Iterator[None]:
        """Within the block, new blocks without an owner get this owner."""
        first = len(self.ledger.sizes)
        yield
        self.ledger.describe_unowned(first, owner, name)

    def adopt_model(self, model: torch.nn.Module, role: str = "") -> None:
        """Counts a model's parameters and buffers as weights, unless it is on the host and still to be sharded."""
        if self.shards and not is_sharded(model) and not role:
            self.name_modules(model)
            return
        if self.offloads and is_sharded(model):
            for parameter in model.parameters():
                self.disown(parameter)
                self.pinned.take(parameter, local(parameter).nbytes)
            self._stepped_on_host += [each for each in model.parameters() if each.requires_grad]
        super().adopt_model(model, role)

    def mark(self, tensor: torch.Tensor, owner: Owner, name: str) -> None:
        """Sets the owner of a tensor's storage, unless it lies on the host."""
        if not self.is_on_host:
            super().mark(tensor, owner, name)

    def count_step(self, costs: Iterable[Cost] = (), pinned: Iterable[int] = ()) -> None:
        """Counts an optimizer step; offloaded shards are stepped on the host."""
        on_host = host_step(map(local, self._stepped_on_host), fused=True)[1:] if self.offloads else ()
        super().count_step((*costs, *on_host), pinned)

    def is_host(self, tensor: torch.Tensor) -> bool:
        block = self.block_of(tensor)
        return block is not None and self.ledger.is_disowned(block)

    def _see(self, tensor: torch.Tensor) -> int | None:
        return super()._see(local(tensor))

    def block_of(self, tensor: torch.Tensor) -> int | None:
        return super().block_of(local(tensor))


def wrapped(owner: Any, name: str, around: Callable[..., Any], *facts: Any) -> AbstractContextManager[Any]:
    """Within the block, ``around(function, *facts, *args, **kwargs)`` replaces ``owner.name(*args, **kwargs)``."""
    function = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **kwargs: around(function, *facts, *args, **kwargs))


def run_unseen(function: Callable[..., Any], recorder: RankRecorder, *args: Any, **kwargs: Any) -> Any:
    """Runs a function (see :func:`wrapped`) without recording what it allocates."""
    with recorder.unseen():
        return function(*args, **kwargs)


def local(tensor: Any) -> Any:
    """Returns this process's part of a tensor, even if a pending collective still fills it."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def is_sharded(model: torch.nn.Module) -> bool:
    """Returns whether a model's parameters are sharded."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


_ROUNDS = {"allreduce_": 2, "allreduce_coalesced_": 2}
"""Collectives that send all bytes around the ring more than once, and how often (nccl-tests, PERFORMANCE.md)."""
_EXCHANGE = "dim_zero_all_to_all"
"""DeepSpeed's own operator (``deepspeed/sequence/layer.py``): each process keeps its own part of the exchanged data."""
_OF_TOKENS = ("all_to_all_single", _EXCHANGE)
"""Collectives whose bytes grow with the tokens: ring attention sends keys, values and their gradients from each process
to the next, and Ulysses exchanges a share of the tokens for a share of the heads."""
_TO_ALL = ("broadcast_", "send", "recv_", "scatter_", "all_to_all_single")
"""Collectives that send each byte once, whatever the number of processes."""
_GATHERS = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_")
_REDUCES = ("allreduce_", "allreduce_coalesced_")


class Collectives:
    """Runs and counts collectives for a recorder. A rehearsal has no other processes, so their results are made up. A
    group that spans nodes uses the network; a node has ``devices`` ranks."""

    NAMESPACES = ("c10d", "_c10d_functional", "deepspeed")

    def __init__(self, devices: int, *, is_fake: bool) -> None:
        self._devices, self._is_fake = devices, is_fake
        self._sent: dict[int, torch.Tensor] = {}
        """Maps the receiving storage to the tensor being sent, which stays alive until ``wait_tensor``
        (``torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp: WorkNCCL::stashed_for_allocator_safety_``)."""

    def run(self, recorder: RankRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs and counts one collective, and sets the known values of its results. DDP reduces gradients in the last
        micro-step of each optimizer step (``accelerate/accelerator.py: no_sync``)."""
        if (cost := self._cost(func, args)) is not None:
            recorder.work.note(replace(cost, of_step=_name(func) in _REDUCES and not recorder.shards))
        if not self._is_fake:
            return recorder.see(func, args, kwargs)
        if _name(func) == "wait_tensor":
            self._sent.pop(args[0].untyped_storage()._cdata, None)
            return args[0]  # as torch/csrc/distributed/c10d/Functional.cpp does; its meta kernel makes a new tensor
        out = func(*args, **kwargs)
        recorder.see_result(out)
        if _name(func) == "all_to_all_single":
            self._sent[out.untyped_storage()._cdata] = args[0]
        _bring(func, args)
        return out

    def note(self, recorder: RankRecorder, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Counts a reduce-scatter of this tensor."""
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
        nodes = {rank // self._devices for rank in dist.get_process_group_ranks(group)}
        kind = Kind.NETWORK_COLLECTIVE if len(nodes) > 1 else Kind.COLLECTIVE
        return Cost(kind=kind, fixed_bytes=round(size_bytes * share))


def _name(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:
                continue
    # Functional collectives take a group's name as last argument (``torch/csrc/distributed/c10d/Functional.cpp``).
    return dist.distributed_c10d._resolve_process_group(args[-1]) if args and isinstance(args[-1], str) else None


def _bytes(arg: Any) -> int:
    if isinstance(arg, torch.Tensor):
        return int(arg.nbytes)
    return sum(map(_bytes, arg)) if isinstance(arg, (list, tuple)) else 0


def _bring(func: Any, args: tuple[Any, ...]) -> None:
    """Sets the values of results, assuming equal data on all processes; values that this leaves open become unknown."""
    if (name := _name(func)) in _GATHERS:
        outs, ins = [*tensors_in([args[0]])], [*tensors_in([args[1]])]
        value = known_value(ins[0]) if len(ins) == 1 else None
        for out in outs:
            _hold(out, value)
    elif name in _REDUCES:
        group = _group(args)
        reduction = next((arg for arg in args[2:] if isinstance(arg, torch.ScriptObject)), None)
        is_sum = reduction is None or "SUM" in str(getattr(reduction, "op", "SUM")).upper()
        for tensor in tensors_in([args[0]]):
            if (value := known_value(tensor)) is not None and group is not None and is_sum:
                with real_tensors():
                    value.mul_(group.size()) if value.dtype is not torch.bool else value
    elif name not in ("broadcast_", _EXCHANGE):
        for tensor in tensors_in(args[:1]):
            _hold(tensor, None)


def _hold(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
    if value is not None:
        with real_tensors():
            repeats = max(1, tensor.numel() // max(1, value.numel()))
            know(tensor, value.flatten().repeat(repeats).reshape(tensor.shape).to(tensor.dtype))
    elif (known := tensor.__dict__.get("known")) is not None:
        known.valid[0] = False
