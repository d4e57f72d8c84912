"""The allocator's count of allocated bytes, block by block: torch's ``allocated_bytes.all`` without a device."""

from __future__ import annotations

from autotrain_mem.allocator.rounding import round_size


class AllocatedBytes:
    """Live blocks, their sum and its peak. Invariant: ``current_bytes`` is the sum of the live blocks' sizes."""

    def __init__(self) -> None:
        self._live: dict[int, int] = {}
        self.current_bytes = 0
        self.peak_bytes = 0

    def allocate(self, block: int, requested_bytes: int) -> int:
        """Count block number ``block``; returns its rounded size."""
        size = round_size(requested_bytes)
        self._live[block] = size
        self.current_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        return size

    def free(self, block: int) -> None:
        """Forget a block; one that was never counted is ignored."""
        self.current_bytes -= self._live.pop(block, 0)
