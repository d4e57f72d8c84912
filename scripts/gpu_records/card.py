"""The device that runs a case: a CUDA card, with all ``torch.cuda`` calls that a recording needs, or a dry run.

Both classes have the same methods, so other modules also work without a GPU. ``Marks`` labels the entries of torch's
memory history with phase and module, since recording a stack trace for each allocation would take most of the time.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from typing import Any

from autotrain_mem.machine.detect import cuda_device
from autotrain_mem.machine.nvml import held_by, nvidia_driver
from autotrain_mem.support.errors import AutofitError
from autotrain_mem.trainers.phases import follow
from autotrain_mem.types import Hardware, Owner, Phase
from gpu_records.history import Event, History
from gpu_records.record import CardFacts, Levels, Outside

EditRows = Callable[[list[Any]], list[Any]]


class Marks:
    """Receives the calls of ``trainers.phases.follow``, and labels allocations with the current phase and module.
    ``say``: sets the label of all following allocations."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._names: dict[int, str] = {}
        self._stack: list[int] = []
        self.phase = Phase.LOAD
        self._label()

    def enter_phase(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self._stack.clear()
            self._label()

    def adopt_model(self, model: Any, role: str = "") -> None:
        self._names |= {id(module): name for name, module in model.named_modules(prefix=role)}

    def mark(self, tensor: Any, owner: Owner, name: str) -> None: ...

    def disown(self, tensor: Any) -> None: ...

    def optimizer_stepped(self, optimizer: Any) -> None: ...

    @contextmanager
    def following(self, trainer: Any) -> Iterator[None]:
        import torch

        follow(trainer, self)
        hooks = torch.nn.modules.module
        entering = hooks.register_module_forward_pre_hook(self._enter)
        leaving = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            entering.remove()
            leaving.remove()

    def _enter(self, module: Any, args: Any) -> None:
        self._stack.append(id(module))
        self._label()

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop() != id(module):
            pass  # checkpointing may stop recomputation early, without leaving the inner modules
        self._label()

    def _label(self) -> None:
        module = self._names.get(self._stack[-1], "") if self._stack else ""
        self._say(f"{self.phase.value} {module}".rstrip())


class CudaCard:
    on_host = False
    """Whether the trainer must be told to stay on the CPU."""

    def __init__(self) -> None:
        self._before: Hardware | None = None
        self._marks: Marks | None = None

    def open(self) -> None:
        """Starts the history. Nothing is on the device yet."""
        with contextlib.suppress(AutofitError):
            self._before = cuda_device(0)  # before torch creates a context
        import torch

        torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python")
        self._marks = Marks(getattr(torch.cuda.memory, "_set_memory_metadata", lambda label: None))

    def cuda_semantics(self) -> AbstractContextManager[None]:
        return nullcontext()

    def train(self, trainer: Any, edit_rows: EditRows) -> None:
        assert self._marks is not None
        collate = trainer.data_collator
        trainer.data_collator = lambda rows: collate(edit_rows(rows))
        with self._marks.following(trainer):
            trainer.train()

    def facts(self) -> CardFacts:
        import torch

        card = torch.cuda.get_device_properties(0)
        return CardFacts(
            name=card.name,
            compute_capability=(card.major, card.minor),
            multiprocessors=card.multi_processor_count,
            total_bytes=torch.cuda.mem_get_info(0)[1],
            driver=nvidia_driver()[0] or None,
            cuda=torch.version.cuda,
            is_real=True,
        )

    def levels(self) -> Levels:
        import torch

        torch.cuda.synchronize()
        return Levels(
            allocated_bytes=torch.cuda.memory_allocated(),
            reserved_bytes=torch.cuda.memory_reserved(),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(),
        )

    def outside(self) -> Outside:
        """Returns the memory outside torch, from NVML's figure for this process or else from free memory."""
        import torch

        reserved = torch.cuda.memory_reserved()
        own = self._before and held_by(self._before, os.getpid())
        if own is not None:
            return Outside(non_torch_bytes=own - reserved, source="NVML's figure for this process")
        free, total = torch.cuda.mem_get_info(0)
        if self._before and (was_free := self._before.free_bytes):
            source, taken = "free memory before and after; right if no other process ran", was_free - free
        else:
            source, taken = "all used memory; right if no other process uses the card", total - free
        return Outside(non_torch_bytes=taken - reserved, source=source)

    def memory_stats(self) -> dict[str, int]:
        import torch

        return {name: int(value) for name, value in torch.cuda.memory_stats().items()}

    def history(self) -> History:
        import torch

        entries = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        return History.of_trace(entries)


class DryCard:
    """A dry run on the CPU: real tensors with CUDA's semantics, counted in a simulated allocator of unlimited size."""

    on_host = True
    LABEL = "dry run"

    def __init__(self, settings: str = "", compute_capability: tuple[int, int] = (8, 0)) -> None:
        from autotrain_mem.allocator.settings import parse_settings
        from autotrain_mem.allocator.simulator import CachingAllocator
        from autotrain_mem.rehearsal.fake_run import Watch

        self._events: list[Event] = []
        self._addresses: dict[int, int] = {}
        self._capability = compute_capability
        self._allocator = CachingAllocator(None, parse_settings(settings), on_action=self._told)
        device: Any = self  # a recorder calls only the four methods below of a simulated card
        self._watch = Watch(device, compute_capability)

    def open(self) -> None: ...

    def cuda_semantics(self) -> AbstractContextManager[None]:
        return self._watch.cuda_semantics()

    def train(self, trainer: Any, edit_rows: EditRows) -> None:
        self._watch.train(trainer, edit_rows)

    def facts(self) -> CardFacts:
        return CardFacts(
            name=self.LABEL,
            compute_capability=self._capability,
            multiprocessors=0,
            total_bytes=0,
            driver=None,
            cuda=None,
            is_real=False,
        )

    def levels(self) -> Levels:
        return Levels(**{each.name: getattr(self._allocator, each.name) for each in fields(Levels)})

    def outside(self) -> Outside:
        return Outside(non_torch_bytes=None, source=self.LABEL)

    def memory_stats(self) -> dict[str, int]:
        return self._allocator.memory_stats()

    def history(self) -> History:
        return History.of(self._events)

    # -- called by the recorder ------------------------------------------------------------------------------------

    def allocate(self, block: int, size_bytes: int, stream: int = 0) -> None:
        self._addresses[block] = self._allocator.malloc(size_bytes, stream)

    def free(self, block: int) -> None:
        self._allocator.free(self._addresses.pop(block))

    def record_stream(self, block: int, stream: int) -> None:
        self._allocator.record_stream(self._addresses[block], stream)

    def empty_cache(self) -> None:
        self._allocator.empty_cache()

    def _told(self, action: str, address: int, size_bytes: int, stream: int) -> None:
        self._events.append(Event(action, address, size_bytes, stream, self._watch.phase.value))
