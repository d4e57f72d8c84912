"""Simulates a card: counts every allocation of a real run on the CPU, and runs out of memory where the card would."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NoReturn

from autotrain_mem.allocator.settings import AllocatorSettings
from autotrain_mem.allocator.simulator import CachingAllocator, OutOfMemory, Refusal
from autotrain_mem.types import Hardware, MemoryReading


class SimulatedGpu:
    """Receives a recorder's events while a run trains on the CPU instead of the card. Its allocator can reserve the
    card's free memory except ``non_torch_bytes``."""

    before_allocation: Callable[[int], None] | None = None
    """Called with the size of every requested block; may raise (``fault_injection``)."""

    def __init__(self, hardware: Hardware, settings: AllocatorSettings | None = None) -> None:
        self.hardware = hardware
        self._allocator = CachingAllocator(
            max(0, hardware.free_bytes - hardware.non_torch_bytes),
            settings,
            total_bytes=hardware.total_bytes,
            outside_bytes=hardware.non_torch_bytes,
        )
        self._addresses: dict[int, int] = {}
        self._lock, self._depth = threading.RLock(), 0
        self._ended: deque[int] = deque()
        """Blocks to free."""
        self.refusal: Refusal | None = None
        """The last request that failed."""
        self.held_then: tuple[int, ...] = ()
        """The blocks that were allocated when that request failed."""

    def allocate(self, block: int, size_bytes: int, stream: int = 0) -> None:
        """Allocates a block. Raises torch.OutOfMemoryError, with torch's message."""
        if self.before_allocation is not None:
            self.before_allocation(size_bytes)
        with self._alone():
            try:
                self._addresses[block] = self._allocator.malloc(size_bytes, stream)
            except OutOfMemory as error:
                import torch  # only a run that already trains comes here

                self.refusal, self.held_then = error.refusal, tuple(self._addresses)
                raise torch.OutOfMemoryError(str(error)) from error

    def free(self, block: int) -> None:
        """Frees a block, after the current allocation if there is one; ignores a refused block. Never waits."""
        self._ended.append(block)
        if self._lock.acquire(blocking=False):
            try:
                with self._alone():
                    pass
            finally:
                self._lock.release()

    def record_stream(self, block: int, stream: int) -> None:
        """Records that another stream uses a block."""
        with self._alone():
            self._allocator.record_stream(self._addresses[block], stream)

    def empty_cache(self) -> None:
        with self._alone():
            self._allocator.empty_cache()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Locks the allocator, and frees waiting blocks before and after."""
        with self._lock:
            self._depth += 1
            try:
                self._give_back()
                yield
                self._give_back()
            finally:
                self._depth -= 1

    def _give_back(self) -> None:
        while self._depth == 1 and self._ended:
            if (address := self._addresses.pop(self._ended.popleft(), None)) is not None:
                self._depth += 1  # blocks that are freed meanwhile wait
                try:
                    self._allocator.free(address)
                    self._allocator.complete_events()  # assumes that other streams are done, as a replayed trace does
                finally:
                    self._depth -= 1

    def refuse(self, size_bytes: int) -> NoReturn:
        """Raises torch.OutOfMemoryError as for a block that is too large, after emptying the cache as torch does."""
        import torch

        self.empty_cache()
        self._allocator.num_alloc_retries += 1
        self._allocator.num_ooms += 1
        self.held_then = tuple(self._addresses)
        self.refusal = self._allocator.refusal(size_bytes, size_bytes)
        raise torch.OutOfMemoryError(self.refusal.message())

    def occupy(self, size_bytes: int) -> None:
        """Takes these bytes, or fewer if fewer are free, as another process would."""
        device = self._allocator.device
        device.take(min(size_bytes, device.free_bytes))

    def memory_stats(self) -> dict[str, int]:
        return self._allocator.memory_stats()

    def reset_peaks(self) -> None:
        """Resets the peaks, as ``torch.cuda.reset_peak_memory_stats``."""
        self._allocator.reset_peak_stats()

    def reading(self) -> MemoryReading:
        """Returns the current and peak use of the card."""
        return MemoryReading.from_stats(self.memory_stats())
