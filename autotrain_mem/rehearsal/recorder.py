"""Records every allocation and free of a run, with phase, owner and module; for fake and for real tensors alike.

A :class:`Recorder` sits above whatever executes the operators and looks at what comes out of each: a storage never seen
before is a birth, a weak reference tells of its death. Storages are counted, not tensors, so views and in-place
operators cost nothing. What a kernel takes and returns within one operator is not visible here: it is asked of a
``workspace``, which knows the kernels of the device that the run stands for.
"""

from __future__ import annotations

import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotrain_mem.rehearsal.lens.unwatched import IN_PLACE, sole_holders, unwatched
from autotrain_mem.spec import Block, Owner, Phase, Trace
from autotrain_mem.spec.trace import CACHE_EMPTIED

_DEVICE_OF = torch.ops.prim.device.default

Execute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs one operator: ``execute(operator, args, kwargs)``."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory that a kernel takes beside its results, as requested of the allocator."""

    size_bytes: int
    kept_as: str = ""
    """The name under which it is kept for good; empty when it is given back as the operator ends."""


Workspace = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], tuple[Scratch, ...]]
"""What the kernel of one operator takes: ``workspace(operator, args, kwargs, out)``; nothing for most of them."""


class Device(Protocol):
    """Something with a size, told of every birth and death as they happen: a simulated GPU."""

    def allocate(self, block: int, size_bytes: int) -> None:
        """Take ``size_bytes`` for block number ``block``; raises torch.OutOfMemoryError when the device is full."""

    def free(self, block: int) -> None:
        """Give back block number ``block``."""

    def empty_cache(self) -> None:
        """Give back what is reserved and not allocated (``torch.cuda.empty_cache``)."""


class _Watched(weakref.ref[Any]):
    """A weak reference to a storage that knows which block it is."""

    __slots__ = ("block", "key")
    block: int
    key: int


def _run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return operator(*args, **kwargs)


class Recorder(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped to mypy here
    """The recording of one run. Enter it around ``trainer.train()``; read it with :meth:`trace`.

    Args:
        execute: Runs an operator; the default calls it.
        device: Told of every birth and death. Its out-of-memory error passes through the operator that asked.
        workspace: Says what the kernels take beside their results; asked of every operator.
    """

    def __init__(
        self, execute: Execute = _run, device: Device | None = None, workspace: Workspace | None = None
    ) -> None:
        super().__init__()
        sole_holders()
        self._execute = execute
        self._device = device
        self._workspace = workspace
        self._live: dict[int, _Watched] = {}
        self._emptied: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._disowned: set[int] = set()
        self._sizes: list[int] = []
        self._owners: list[Owner | None] = []
        self._names: list[str] = []
        self._born_in: list[int] = []
        self._died_in: list[int | None] = []
        self._with_grad: list[bool] = []
        self._phase_of: list[Phase] = []
        self._events: array[int] = array("q")
        self._phase_starts: list[tuple[int, Phase]] = [(0, Phase.LOAD)]
        self._phase = Phase.LOAD
        self._stretch = 0
        self._grad_enabled = True
        self._module_names: dict[int, str] = {}
        self._module_stack: list[int] = []
        self._operators = 0
        self._started = time.perf_counter()

    # -- what the stage and the trainer tell ---------------------------------------------------------------------

    def enter_phase(self, phase: Phase) -> None:
        """Everything from here on belongs to ``phase``."""
        if phase is self._phase:
            return
        self._phase = phase
        self._stretch += 1
        self._module_stack.clear()
        self._phase_starts.append((len(self._events), phase))

    @property
    def phase(self) -> Phase:
        """The phase that events are being recorded under."""
        return self._phase

    def adopt_model(self, model: torch.nn.Module) -> None:
        """Count the model's parameters and buffers as weights, in order, and learn its modules' names."""
        for name, module in model.named_modules():
            self._module_names[id(module)] = name
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.mark(tensor, Owner.WEIGHTS, name)

    def adopt_batch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count a batch that has just arrived on the device."""
        for tensor in tensors:
            self.mark(tensor, Owner.OTHER, "batch")

    def mark(self, tensor: torch.Tensor, owner: Owner, name: str) -> None:
        """Say whose a tensor's storage is; one that was never seen is born here."""
        block = self._see(tensor)
        if block is not None:
            self._owners[block] = owner
            self._names[block] = name

    def disown(self, tensor: torch.Tensor) -> None:
        """Take a tensor's storage out of the record: on a GPU it would not be in torch's allocator."""
        block = self._see(tensor)
        if block is not None and block not in self._disowned:
            self._disowned.add(block)
            if self._device is not None:
                self._device.free(block)

    def empty_cache(self) -> None:
        """The allocator gives back what it holds in reserve (``torch.cuda.empty_cache``)."""
        self._events.append(CACHE_EMPTIED)
        if self._device is not None:
            self._device.empty_cache()

    # -- what happens --------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper against torch.compile around each operator: it costs as much as the recording itself."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            return args[0].fake_device  # asked only of fake tensors, twice as often as anything is computed
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # it hands over wholes, such as linear, whose parts would go unseen
            with self:
                parts: Any = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        self._operators += 1
        if func in IN_PLACE:
            func = unwatched(func, args)
        out = self._execute(func, args, kwargs)
        if isinstance(out, torch.Tensor):
            self._see(out)
        elif isinstance(out, (list, tuple)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self._see(item)
        if self._workspace is not None:
            for scratch in self._workspace(func, args, kwargs, out):
                self._take(scratch)
        return out

    def _see(self, tensor: torch.Tensor) -> int | None:
        """Look at a tensor that is alive; returns its block, None when it holds no storage of its own."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        watched = self._live.get(key)
        if watched is not None:
            if self._sizes[watched.block] == size:
                return watched.block
            self._die(watched)
        if size == 0:
            return None
        return self._be_born(storage, key, size)

    def _be_born(self, storage: Any, key: int, size: int) -> int:
        block = self._new_block(size)
        watched = _Watched(storage, self._die)
        watched.block, watched.key = block, key
        self._live[key] = watched
        if self._device is not None:
            self._device.allocate(block, size)
        return block

    def _take(self, scratch: Scratch) -> None:
        """Born while the operator's inputs and results are all alive, and dead before the next operator."""
        block = self._new_block(scratch.size_bytes)
        self._owners[block] = Owner.OTHER if scratch.kept_as else Owner.TEMPORARY
        self._names[block] = scratch.kept_as or self._names[block]
        taken = False
        try:
            if self._device is not None:
                self._device.allocate(block, scratch.size_bytes)
            taken = True
        finally:
            if not (taken and scratch.kept_as):
                self._end(block)

    def _new_block(self, size: int) -> int:
        block = len(self._sizes)
        grad_enabled = torch.is_grad_enabled()
        if grad_enabled is not self._grad_enabled:
            self._grad_enabled = grad_enabled
            # Within a backward pass grad mode is on only while a checkpoint recomputes its forward.
            self._stretch += self._phase is Phase.BACKWARD
        self._sizes.append(size)
        self._owners.append(None)
        self._names.append(self._module_names.get(self._module_stack[-1], "") if self._module_stack else "")
        self._born_in.append(self._stretch)
        self._died_in.append(None)
        self._with_grad.append(grad_enabled)
        self._phase_of.append(self._phase)
        self._events.append(block + 1)
        return block

    def _die(self, watched: weakref.ref[Any]) -> None:
        assert isinstance(watched, _Watched)
        if self._live.get(watched.key) is not watched:
            return  # died by a resize, and was born again under the same key
        del self._live[watched.key]
        self._end(watched.block)

    def _end(self, block: int) -> None:
        self._died_in[block] = self._stretch
        self._events.append(-block - 1)
        if self._device is not None:
            self._device.free(block)

    def _resized(self, storage: Any) -> None:
        watched = self._live.get(storage._cdata)
        size = storage.nbytes()
        emptied = self._emptied.pop(storage, None)
        if watched is not None and self._sizes[watched.block] != size:
            emptied = watched.block
            self._die(watched)
        if emptied is None:
            return
        if size:
            block = self._be_born(storage, storage._cdata, size)
            self._owners[block], self._names[block] = self._owners[emptied], self._names[emptied]
        else:
            self._emptied[storage] = emptied

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record everything inside: operators, storage resizes (which FSDP2 frees by), and module names."""
        resize = torch.UntypedStorage.resize_

        def watched_resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
            return result

        hooks = torch.nn.modules.module
        entering = hooks.register_module_forward_pre_hook(self._enter_module)
        leaving = hooks.register_module_forward_hook(self._leave_module, always_call=True)
        torch.UntypedStorage.resize_ = watched_resize
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize
            entering.remove()
            leaving.remove()

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        self._module_stack.append(id(module))

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # A checkpoint that stops its recomputation early leaves by an exception, past modules further in.
        while self._module_stack and self._module_stack.pop() != id(module):
            pass

    # -- what came of it -----------------------------------------------------------------------------------------

    def trace(self, not_counted: tuple[str, ...] = ()) -> Trace:
        """The run so far, without what was disowned."""
        kept = [block for block in range(len(self._sizes)) if block not in self._disowned]
        number = {block: index + 1 for index, block in enumerate(kept)}
        events: array[int] = array("q")
        starts: list[tuple[int, Phase]] = []
        coming = iter((*self._phase_starts, (len(self._events) + 1, self._phase)))
        following, phase = next(coming)
        for index, event in enumerate(self._events):
            while index >= following:
                starts.append((len(events), phase))
                following, phase = next(coming)
            block = abs(event) - 1
            if event == CACHE_EMPTIED:
                events.append(CACHE_EMPTIED)
            elif block in number:
                events.append(number[block] if event > 0 else -number[block])
        return Trace(
            blocks=tuple(
                Block(size_bytes=self._sizes[block], owner=self._owner(block), module=self._names[block])
                for block in kept
            ),
            events=events,
            phase_starts=tuple(starts),
            operators=self._operators,
            seconds=time.perf_counter() - self._started,
            not_counted=not_counted,
        )

    def _owner(self, block: int) -> Owner:
        """Marked blocks have their owner; the rest is told by when it was born and when it died.

        A block that outlives the stretch of forward (or of recomputation) that made it is kept for the backward
        pass: an activation. One that does not is a temporary.
        """
        owner = self._owners[block]
        if owner is not None:
            return owner
        phase = self._phase_of[block]
        if phase is Phase.LOAD:
            return Owner.OTHER
        outlived = self._died_in[block] != self._born_in[block]
        made_by_forward = phase is Phase.FORWARD or (phase is Phase.BACKWARD and self._with_grad[block])
        return Owner.ACTIVATIONS if made_by_forward and outlived else Owner.TEMPORARY
