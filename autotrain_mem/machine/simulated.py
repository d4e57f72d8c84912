"""A card that is not there: takes every allocation of a real run on the CPU and is full when that card would be."""

from __future__ import annotations

from autotrain_mem.allocator.settings import AllocatorSettings
from autotrain_mem.allocator.simulator import CachingAllocator, OutOfMemory
from autotrain_mem.spec import Hardware
from autotrain_mem.spec.report import MemoryReading


class SimulatedGpu:
    """The device that a recorder reports to while a run trains on the CPU in the card's place.

    Args:
        hardware: The card. What its allocator may reserve is what is free, less what lies outside the allocator.
        settings: Of the allocator.
    """

    def __init__(self, hardware: Hardware, settings: AllocatorSettings | None = None) -> None:
        self.hardware = hardware
        self._allocator = CachingAllocator(
            max(0, hardware.free_bytes - hardware.non_torch_bytes),
            settings,
            total_bytes=hardware.total_bytes,
            outside_bytes=hardware.non_torch_bytes,
        )
        self._addresses: dict[int, int] = {}

    def allocate(self, block: int, size_bytes: int, stream: int = 0) -> None:
        """Take a block; raises torch.OutOfMemoryError, with torch's message, when the card is full."""
        try:
            self._addresses[block] = self._allocator.malloc(size_bytes, stream)
        except OutOfMemory as error:
            import torch  # only a run that already trains comes here

            raise torch.OutOfMemoryError(str(error)) from error

    def free(self, block: int) -> None:
        """Give a block back; one that was refused is ignored."""
        address = self._addresses.pop(block, None)
        if address is not None:
            self._allocator.free(address)

    def record_stream(self, block: int, stream: int) -> None:
        """Another stream uses a block."""
        self._allocator.record_stream(self._addresses[block], stream)

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache``."""
        self._allocator.empty_cache()

    def memory_stats(self) -> dict[str, int]:
        """``torch.cuda.memory_stats`` of the card."""
        return self._allocator.memory_stats()

    def reading(self) -> MemoryReading:
        """What is taken of the card now, and was at most."""
        return MemoryReading.from_stats(self.memory_stats())
