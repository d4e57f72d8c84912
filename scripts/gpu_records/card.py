"""The device that a case runs on: a CUDA card, with every call of ``torch.cuda`` that a recording needs; or a dry run.

Both offer the same, so that all else is the same for both and runs where there is no GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from gpu_records.history import Event, History
from gpu_records.marks import Marks
from gpu_records.record import CardFacts, Levels, Outside

EditRows = Callable[[list[Any]], list[Any]]
STEADY_SECONDS = 5.0
"""How long NVML may take to show a process's memory, or to forget that of one that ended."""


class Card(Protocol):
    """One process's use of one device, from before anything lies on it to after the last step."""

    on_host: bool
    """Whether the trainer must be told to stay on the CPU."""

    def open(self) -> None:
        """Begin the history. Nothing is on the device yet."""

    def cuda_semantics(self) -> AbstractContextManager[None]:
        """Inside, the trainer is built and trains."""

    def train(self, trainer: Any, edit_rows: EditRows) -> None:
        """``trainer.train()`` on edited rows."""

    def facts(self) -> CardFacts: ...

    def levels(self) -> Levels: ...

    def outside(self) -> Outside: ...

    def memory_stats(self) -> dict[str, int]: ...

    def history(self) -> History: ...


class CudaCard:
    """The first card that this process sees."""

    on_host = False

    def __init__(self) -> None:
        self._nvml = _Nvml()
        self._free_before: int | None = None
        self._marks: Marks | None = None

    def open(self) -> None:
        self._free_before = self._nvml.free_bytes()  # asked before torch makes a context
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
            driver=self._nvml.driver(),
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
        """By NVML's figure for this process, where it gives one; else by what is free now and was before."""
        import os

        import torch

        reserved = torch.cuda.memory_reserved()
        own = self._nvml.process_bytes(os.getpid())
        if own is not None:
            return Outside(non_torch_bytes=own - reserved, source="NVML's figure for this process")
        free, total = torch.cuda.mem_get_info(0)
        if self._free_before is not None:
            taken = self._free_before - free
            return Outside(non_torch_bytes=taken - reserved, source="free before and after; right if nobody else ran")
        return Outside(
            non_torch_bytes=total - free - reserved, source="all that is used; right if nobody else is there"
        )

    def memory_stats(self) -> dict[str, int]:
        import torch

        return {name: int(value) for name, value in torch.cuda.memory_stats().items()}

    def history(self) -> History:
        import torch

        (entries,) = (trace for trace in torch.cuda.memory._snapshot()["device_traces"][:1])
        torch.cuda.memory._record_memory_history(enabled=None)
        return History.of_trace(entries)


class _Nvml:
    """The few questions to NVML; None where it is missing or does not know.

    The card is the one that CUDA_VISIBLE_DEVICES names by its UUID or number, else the first.
    """

    def __init__(self) -> None:
        self._library: Any = None
        self._handle: Any = None
        with contextlib.suppress(Exception):  # ImportError, or whatever NVML has to say
            import pynvml

            pynvml.nvmlInit()
            self._handle = _handle(pynvml)
            self._library = pynvml

    def driver(self) -> str | None:
        return None if self._library is None else self._asked(self._library.nvmlSystemGetDriverVersion)

    def free_bytes(self) -> int | None:
        if self._library is None:
            return None
        memory = self._asked(lambda: self._library.nvmlDeviceGetMemoryInfo(self._handle))
        return None if memory is None else int(memory.free)

    def process_bytes(self, pid: int) -> int | None:
        """NVML lists a process a moment after it took memory; in a container, under another number or not at all."""
        deadline = time.monotonic() + STEADY_SECONDS
        while self._library is not None and time.monotonic() < deadline:
            processes = self._asked(lambda: self._library.nvmlDeviceGetComputeRunningProcesses(self._handle)) or []
            found = [process.usedGpuMemory for process in processes if process.pid == pid]
            if found and found[0]:
                return int(found[0])
            if processes and pid not in [process.pid for process in processes]:
                return None
            time.sleep(0.2)
        return None

    def _asked(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self._library.NVMLError:
            return None


def _handle(nvml: Any) -> Any:
    import os

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if chosen.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(chosen))
    return nvml.nvmlDeviceGetHandleByUUID(chosen)


class DryCard:
    """A dry run on the CPU: true tensors, seen as a card would see them, in a simulated allocator without an end."""

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
        self._watch = Watch(self, compute_capability)

    def open(self) -> None: ...

    @contextmanager
    def cuda_semantics(self) -> Iterator[None]:
        with self._watch.cuda_semantics():
            yield

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
        return Levels(
            allocated_bytes=self._allocator.allocated_bytes,
            reserved_bytes=self._allocator.reserved_bytes,
            peak_allocated_bytes=self._allocator.peak_allocated_bytes,
            peak_reserved_bytes=self._allocator.peak_reserved_bytes,
        )

    def outside(self) -> Outside:
        return Outside(non_torch_bytes=None, source=self.LABEL)

    def memory_stats(self) -> dict[str, int]:
        return self._allocator.memory_stats()

    def history(self) -> History:
        return History.of(self._events)

    # -- what the recorder tells a device --------------------------------------------------------------------------

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
