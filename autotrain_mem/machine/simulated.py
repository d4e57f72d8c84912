"""A card that is not there: takes every allocation of a real run on the CPU and is full when that card would be."""

from __future__ import annotations

from typing import Protocol

from autotrain_mem.spec import Hardware
from autotrain_mem.units import GIB, MIB


class Accounting(Protocol):
    """The allocator's count (``allocator.allocated.AllocatedBytes``), handed in so that this layer needs no other."""

    current_bytes: int
    peak_bytes: int

    def allocate(self, block: int, requested_bytes: int) -> int:
        """Count a block; returns its rounded size."""

    def free(self, block: int) -> None:
        """Forget a block."""


class SimulatedGpu:
    """The device that a recorder reports to while a run trains on the CPU in the card's place.

    Args:
        hardware: The card. What tensors may take of it is what is free, less what lies outside torch's allocator.
    """

    def __init__(self, hardware: Hardware, accounting: Accounting) -> None:
        self.hardware = hardware
        self.capacity_bytes = hardware.free_bytes - hardware.non_torch_bytes
        self._accounting = accounting
        self.peak_bytes = 0
        """The most that was ever allocated, an allocation that failed not counted."""

    @property
    def allocated_bytes(self) -> int:
        """What is allocated now."""
        return self._accounting.current_bytes

    def allocate(self, block: int, size_bytes: int) -> None:
        """Take a block; raises torch.OutOfMemoryError, worded as torch words it, when the card is full."""
        self._accounting.allocate(block, size_bytes)
        if self._accounting.current_bytes > self.capacity_bytes:
            self._accounting.free(block)
            raise self._out_of_memory(size_bytes)
        self.peak_bytes = max(self.peak_bytes, self._accounting.current_bytes)

    def free(self, block: int) -> None:
        """Give a block back."""
        self._accounting.free(block)

    def empty_cache(self) -> None:
        """Nothing to do: the accounting reserves no more than is allocated."""

    def _out_of_memory(self, size_bytes: int) -> Exception:
        import torch  # only a run that already trains comes here

        free = self.capacity_bytes - self.allocated_bytes
        error: Exception = torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {_as_torch(size_bytes)}. GPU 0 has a total capacity of "
            f"{_as_torch(self.hardware.total_bytes)} of which {_as_torch(free)} is free. Of the allocated memory "
            f"{_as_torch(self.allocated_bytes)} is allocated by PyTorch. (simulated {self.hardware.name})"
        )
        return error


def _as_torch(size_bytes: int) -> str:
    """``c10/cuda/CUDACachingAllocator.cpp: format_size``."""
    if size_bytes <= 1024:
        return f"{size_bytes} bytes"
    if size_bytes <= MIB:
        return f"{size_bytes / 1024:.2f} KiB"
    if size_bytes <= GIB:
        return f"{size_bytes / MIB:.2f} MiB"
    return f"{size_bytes / GIB:.2f} GiB"
