"""The memory that the allocator takes its segments from: ``cudaMalloc`` and ``cuMemCreate`` of a device with a size."""

from __future__ import annotations

FIRST_ADDRESS = 0x7F0000000000
"""Where a Linux process finds CUDA's first segments, more or less; nothing depends on it but the look of a snapshot."""
GRANULARITY_BYTES = 2 << 20
"""Physical memory comes in pages of 2 MiB (``cuMemGetAllocationGranularity``)."""


class DeviceMemory:
    """Holds what is left of a device, and addresses that were not given out yet.

    Args:
        capacity_bytes: What the allocator can have in all; None for no end.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.taken_bytes = 0
        self._next_address = FIRST_ADDRESS

    @property
    def free_bytes(self) -> int:
        """Says what ``cudaMemGetInfo`` calls free; 0 where there is no end."""
        return 0 if self.capacity_bytes is None else self.capacity_bytes - self.taken_bytes

    def take(self, size: int) -> bool:
        """Take physical memory; False where it is out."""
        if self.capacity_bytes is not None and self.taken_bytes + size > self.capacity_bytes:
            return False
        self.taken_bytes += size
        return True

    def give_back(self, size: int) -> None:
        """``cudaFree``, ``cuMemRelease``."""
        self.taken_bytes -= size

    def addresses(self, size: int) -> int:
        """A range of addresses that nothing else has (``cudaMalloc``, ``cuMemAddressReserve``): above all others."""
        address = self._next_address
        self._next_address += -(-size // GRANULARITY_BYTES) * GRANULARITY_BYTES
        return address
