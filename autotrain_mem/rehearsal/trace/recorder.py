"""Records every allocation and free of a run on fake or real tensors, with phase, owner and module.

A :class:`Recorder` looks at the result of each operator: a new storage is a birth, and a weak reference reports its
death. A ``workspace`` function computes the memory that a kernel allocates and frees within one operator.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Self
from unittest.mock import patch

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from autotrain_mem.machine.simulated_card import SimulatedGpu
from autotrain_mem.rehearsal.cuda.inplace_accumulation import IN_PLACE, sole_holders, unwatched
from autotrain_mem.rehearsal.trace.flops import WorkCounter
from autotrain_mem.rehearsal.trace.ledger import Ledger, PinnedMemory, UnpinnedMemory
from autotrain_mem.rehearsal.trace.operator_costs import Cost, host_step
from autotrain_mem.trainers.host_optimizer import HostOptimizer, master_bytes
from autotrain_mem.types import Owner, Phase, Trace

_DEVICE_OF = torch.ops.prim.device.default
_DROPOUT = torch.ops.aten.native_dropout.default

Execute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs one operator: ``execute(operator, args, kwargs)``."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory that a kernel allocates besides its results."""

    size_bytes: int
    kept_as: str = ""
    """The name of permanent memory, which is allocated once for each Scratch object; empty if the operator frees it."""


Workspace = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], tuple[Scratch, ...]]
"""Returns the scratch memory of one operator's kernel: ``workspace(operator, args, kwargs, out)``."""

Played = tuple[int, int, bool, Owner | None]
"""An allocation: block number, bytes, grad mode and owner. 0 bytes mean that the block is freed."""


class _Watched(weakref.ref[Any]):
    """A weak reference to a storage, with its block and its key among the live storages."""

    __slots__ = ("block", "key")
    block: int
    key: int


class Recorder(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped to mypy here
    """Records one run. Enter it around ``trainer.train()``; read it with :meth:`trace`. ``execute`` runs an operator;
    None calls it. ``device`` gets births and deaths; the operator that allocates raises its out-of-memory error."""

    def __init__(
        self, execute: Execute | None = None, device: SimulatedGpu | None = None, workspace: Workspace | None = None
    ) -> None:
        super().__init__()
        sole_holders()
        self.ledger, self.work = Ledger(device), WorkCounter()
        self.pinned, self.unpinned = PinnedMemory(), UnpinnedMemory()
        """Pinned and unpinned host memory that offloading uses."""
        self.saved_model_bytes = self.saved_state_bytes = self.unquantized_bytes = 0
        self._execute = execute or (lambda operator, args, kwargs: operator(*args, **kwargs))
        self._workspace = workspace
        self._live: dict[int, _Watched] = {}
        self._kept: dict[int, Scratch] = {}
        self._attached: dict[int, list[int]] = {}
        self._emptied: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._module_names: dict[int, str] = {}
        self._module_stack: list[int] = []

    def enter_phase(self, phase: Phase) -> None:
        if phase is not self.ledger.phase:
            self._module_stack.clear()
            self.ledger.enter_phase(phase)
            self.work.enter_phase(phase)

    @property
    def phase(self) -> Phase:
        return self.ledger.phase

    def adopt_model(self, model: torch.nn.Module, role: str = "") -> None:
        """Counts the model's parameters and buffers as weights, in order, and stores its modules' names. The names of
        a model that is not trained begin with its ``role``."""
        self.name_modules(model, role)
        for name, tensor in (*model.named_parameters(role), *model.named_buffers(role)):
            self.mark(tensor, Owner.WEIGHTS, name)
            self.work.know_weight(tensor)

    def name_modules(self, model: torch.nn.Module, role: str = "") -> None:
        """Stores the modules' names, for the blocks that their forward allocates."""
        self._module_names |= {id(module): name for name, module in model.named_modules(prefix=role)}

    def adopt_batch(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self.mark(tensor, Owner.OTHER, "batch")

    def mark(self, tensor: torch.Tensor, owner: Owner, name: str) -> None:
        """Sets the owner and name of a tensor's storage, which is recorded if new."""
        if (block := self._see(tensor)) is not None:
            self.ledger.describe(block, owner, name)

    def disown(self, tensor: torch.Tensor) -> None:
        """Removes a tensor's storage from the record, since on a GPU it is not in torch's allocator."""
        if (block := self._see(tensor)) is not None:
            self.ledger.disown(block)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, HostOptimizer):
            self.count_step()
            return
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        stepped = [weight for weight in weights if weight.grad is not None]
        # ``trainers/host_optimizer.py: _HostParameter``: a buffer each, and copies of those that are not rounded
        pinned = [weight.nbytes for weight in weights for _ in range(1 if master_bytes(weight) else 2)]
        self.unpinned.peak_bytes = max(self.unpinned.peak_bytes, sum(map(master_bytes, stepped)))  # their gradients
        fused, decays = (bool(optimizer.param_groups[0].get(option)) for option in ("fused", "weight_decay"))
        self.count_step(host_step(stepped, fused=fused, decays=decays), pinned)

    def count_step(self, costs: Iterable[Cost] = (), pinned: Iterable[int] = ()) -> None:
        """Counts an optimizer step, with its costs on the host and the bytes of its pinned tensors."""
        self.pinned.keep(pinned)
        for cost in costs:
            self.work.note(cost)
        self.work.optimizer_stepped()

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the block of a tensor's storage; None if it is not on the device."""
        watched = self._live.get(tensor.untyped_storage()._cdata)
        return None if watched is None else watched.block

    @contextmanager
    def taken(self, size_bytes: int, owner: Owner, name: str) -> Iterator[None]:
        """Within the ``with`` block, holds device memory that has no tensor here."""
        block = self.ledger.write_birth(size_bytes, name, grad_enabled=torch.is_grad_enabled())
        self.ledger.describe(block, owner, name)
        try:
            self.ledger.allocate(block)
            yield
        finally:
            self.ledger.end(block)

    def touch(self, size_bytes: int, owner: Owner, name: str = "") -> None:
        """Allocates device memory that has no tensor here, and frees it at once."""
        with self.taken(size_bytes, owner, name):
            pass

    def fork(self) -> Self:
        """Returns a recorder for a trial outside the run, with this one's weight shapes and kept scratch."""
        other = Recorder(self._execute, workspace=self._workspace)
        other.work = self.work.fork()
        other._kept = dict(self._kept)
        return other

    def has_kept_as_much_as(self, other: Self) -> bool:
        return self._kept.keys() == other._kept.keys()

    def replay(self, steps: Iterable[Played], blocks: dict[int, int]) -> None:
        """Repeats recorded births and deaths; updates ``blocks``, which maps recorded numbers to blocks of this run."""
        ledger, module = self.ledger, self._module()
        for number, size_bytes, with_grad, owner in steps:
            if not size_bytes:
                ledger.end(blocks.pop(number))
                continue
            block = blocks[number] = ledger.write_birth(size_bytes, module, grad_enabled=with_grad)
            if owner is not None:
                ledger.describe(block, owner, module)
            ledger.allocate(block)

    def attach(self, tensor: torch.Tensor, blocks: Iterable[int]) -> None:
        """Ties the lifetime of blocks to that of an unrecorded tensor, whose own bytes do not count."""
        storage = tensor.untyped_storage()
        carrier = self.ledger.write_unseen(storage.nbytes())
        self._watch(storage, storage._cdata, carrier)
        self._attached[carrier] = [*blocks]

    def detach(self, tensor: torch.Tensor) -> None:
        """Undoes :meth:`attach`, so that the blocks are freed separately."""
        self._attached[self._live[tensor.untyped_storage()._cdata].block].clear()

    def empty_cache(self) -> None:
        """Releases the cache (``torch.cuda.empty_cache``)."""
        self.ledger.empty_cache()

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Within the ``with`` block, blocks are allocated on this stream (``torch.cuda.stream``)."""
        before, self.ledger.stream = self.ledger.stream, stream
        try:
            yield
        finally:
            self.ledger.stream = before

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        """Records another stream that uses a tensor (``torch.Tensor.record_stream``)."""
        if (block := self.block_of(tensor)) is not None:
            self.ledger.use_on_stream(block, stream)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from disabling Dynamo around each operator, which would take as long as recording it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            return args[0].fake_device  # a shortcut: torch reads a fake tensor's device often
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # this mode dispatches composite operators, such as linear
            with self:
                parts: Any = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        self.ledger.operators += 1
        if func in IN_PLACE:
            func = unwatched(func, args)
        out = self._execute(func, args, kwargs)
        self.work.see(func, args, kwargs, out)
        if isinstance(out, torch.Tensor):
            self._see(out)
        elif isinstance(out, (list, tuple)):
            for item in reversed(out) if func is _DROPOUT else out:  # native/cuda/Dropout.cu allocates the mask first
                if isinstance(item, torch.Tensor):
                    self._see(item)
        if self._workspace is not None:
            for scratch in self._workspace(func, args, kwargs, out):
                self._take(scratch)
        return out

    def _see(self, tensor: torch.Tensor) -> int | None:
        """Returns the block of a tensor's storage, which is recorded if new; None if it has no bytes on a device."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if (watched := self._live.get(key)) is not None:
            if self.ledger.sizes[watched.block] == size:
                return watched.block
            self._die(watched)
        return None if size == 0 or tensor.device.type == "meta" else self._be_born(storage, key, size)

    def _be_born(self, storage: Any, key: int, size: int) -> int:
        block = self.ledger.write_birth(size, self._module(), grad_enabled=torch.is_grad_enabled())
        self._watch(storage, key, block)
        self.ledger.allocate(block)
        return block

    def _watch(self, storage: Any, key: int, block: int) -> None:
        watched = _Watched(storage, self._die)
        watched.block, watched.key = block, key
        self._live[key] = watched

    def _module(self) -> str:
        return self._module_names.get(self._module_stack[-1], "") if self._module_stack else ""

    def _take(self, scratch: Scratch) -> None:
        """Allocates scratch memory after an operator's results; frees it again unless it is permanent."""
        if not scratch.kept_as:
            self.touch(scratch.size_bytes, Owner.TEMPORARY, self._module())
            return
        if id(scratch) in self._kept:
            return
        block = self.ledger.write_birth(scratch.size_bytes, scratch.kept_as, grad_enabled=torch.is_grad_enabled())
        self.ledger.describe(block, Owner.OTHER, scratch.kept_as)
        try:
            self.ledger.allocate(block)
        except Exception:
            self.ledger.end(block)
            raise
        self._kept[id(scratch)] = scratch

    def _die(self, watched: weakref.ref[Any]) -> None:
        assert isinstance(watched, _Watched)
        if self._live.get(watched.key) is not watched:
            return  # a resize replaced it by another block with the same key
        del self._live[watched.key]
        for block in self._attached.pop(watched.block, [watched.block]):
            self.ledger.end(block)

    def _resized(self, storage: Any) -> None:
        watched = self._live.get(storage._cdata)
        size = storage.nbytes()
        emptied = self._emptied.pop(storage, None)
        if watched is not None and self.ledger.sizes[watched.block] != size:
            emptied = watched.block
            self._die(watched)
        if emptied is None:
            return
        if size:
            self.ledger.describe_as(self._be_born(storage, storage._cdata, size), emptied)
        else:
            self._emptied[storage] = emptied

    @contextmanager
    def recording(self) -> Iterator[Self]:
        """Records operators, storage resizes (with which FSDP2 frees memory), and module names within the block."""
        resize = torch.UntypedStorage.resize_

        def watched_resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
            return result

        hooks = torch.nn.modules.module
        entering = hooks.register_module_forward_pre_hook(lambda module, _: self._module_stack.append(id(module)))
        leaving = hooks.register_module_forward_hook(self._leave_module, always_call=True)
        resizing = patch.object(torch.UntypedStorage, "resize_", watched_resize)
        with entering, leaving, self, recorded_by(self), resizing:
            yield self

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # Also removes inner modules whose hook an exception skipped: a checkpoint ends its recomputation by one.
        while self._module_stack and self._module_stack.pop() != id(module):
            pass

    def trace(self, not_counted: tuple[str, ...] = ()) -> Trace:
        """Returns the trace of the run so far, without disowned blocks."""
        return replace(
            self.ledger.trace(not_counted, self.work.workload()),
            pinned_host_bytes=self.pinned.peak_bytes,
            unpinned_host_bytes=self.unpinned.peak_bytes,
            saved_model_bytes=self.saved_model_bytes,
            saved_state_bytes=self.saved_state_bytes,
            unquantized_bytes=self.unquantized_bytes,
        )


_recording: ContextVar[Recorder | None] = ContextVar("recording", default=None)


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Makes this the active recorder within the block."""
    token = _recording.set(recorder)
    try:
        yield
    finally:
        _recording.reset(token)


def current_recorder() -> Recorder | None:
    """Returns the active recorder, if any."""
    return _recording.get()


def note(cost: Cost) -> None:
    """Adds the cost of work that runs no torch operator to the active recorder, if any."""
    if recorder := _recording.get():
        recorder.work.note(cost)
