"""Counts the allocator's statistics under torch's names (``torch.cuda.memory_stats``).

There is one tally for each pool and one for all; ``c10/core/CachingDeviceAllocator.h: DeviceStats``. Of each statistic
the current value, its peak and the sum of all increases are kept; what was ever freed is their difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Stat:
    """Holds one statistic (``c10/core/Allocator.h: Stat``)."""

    current: int = 0
    peak: int = 0
    allocated: int = 0

    def change(self, amount: int) -> None:
        """Adds or takes away (``increase_stat``, ``decrease_stat``)."""
        self.current += amount
        if amount > 0:
            self.allocated += amount
            self.peak = max(self.peak, self.current)

    def named(self, name: str) -> dict[str, int]:
        """Returns torch's four figures of it."""
        return {
            f"{name}.current": self.current,
            f"{name}.peak": self.peak,
            f"{name}.allocated": self.allocated,
            f"{name}.freed": self.allocated - self.current,
        }


@dataclass(slots=True)
class Tally:
    """Holds the statistics of one pool, or of all.

    Those that change with every call are plain numbers, since a call on each would double the cost of a simulation:
    ``active`` and ``active_bytes`` follow ``allocation`` and ``allocated_bytes`` up at once, and down when the block is
    free for others.
    """

    allocation: int = 0
    peak_allocation: int = 0
    total_allocation: int = 0
    allocated_bytes: int = 0
    peak_allocated_bytes: int = 0
    total_allocated_bytes: int = 0
    requested_bytes: int = 0
    peak_requested_bytes: int = 0
    total_requested_bytes: int = 0
    active: int = 0
    peak_active: int = 0
    active_bytes: int = 0
    peak_active_bytes: int = 0
    segment: Stat = field(default_factory=Stat)
    reserved_bytes: Stat = field(default_factory=Stat)
    inactive_split: Stat = field(default_factory=Stat)
    inactive_split_bytes: Stat = field(default_factory=Stat)

    def allocate(self, size: int, requested: int) -> None:
        """Counts a block that was handed out."""
        self.allocation += 1
        self.active += 1
        self.allocated_bytes += size
        self.active_bytes += size
        self.requested_bytes += requested
        self.total_allocation += 1
        self.total_allocated_bytes += size
        self.total_requested_bytes += requested
        if self.allocation > self.peak_allocation:
            self.peak_allocation = self.allocation
        if self.active > self.peak_active:
            self.peak_active = self.active
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.active_bytes > self.peak_active_bytes:
            self.peak_active_bytes = self.active_bytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes

    def release(self, size: int, requested: int) -> None:
        """Counts a block that was given back, and is free for others at once."""
        self.allocation -= 1
        self.active -= 1
        self.allocated_bytes -= size
        self.active_bytes -= size
        self.requested_bytes -= requested

    def free(self, size: int) -> None:
        """Counts a block that was given back, while other streams still use it."""
        self.allocation -= 1
        self.allocated_bytes -= size

    def deactivate(self, size: int, requested: int) -> None:
        """Counts such a block once its last use is over."""
        self.active -= 1
        self.active_bytes -= size
        self.requested_bytes -= requested

    def change_inactive(self, blocks: int, size: int) -> None:
        """Counts free blocks beside others, which came, went or changed their size."""
        count, summed = self.inactive_split, self.inactive_split_bytes
        count.current += blocks
        if blocks > 0:
            count.allocated += blocks
            if count.current > count.peak:
                count.peak = count.current
        summed.current += size
        if size > 0:
            summed.allocated += size
            if summed.current > summed.peak:
                summed.peak = summed.current

    def reset_peaks(self) -> None:
        """Follows ``torch.cuda.reset_peak_memory_stats``."""
        self.peak_allocation, self.peak_active = self.allocation, self.active
        self.peak_allocated_bytes, self.peak_active_bytes = self.allocated_bytes, self.active_bytes
        self.peak_requested_bytes = self.requested_bytes
        for stat in (self.segment, self.reserved_bytes, self.inactive_split, self.inactive_split_bytes):
            stat.peak = stat.current

    def named(self, pool: str) -> dict[str, int]:
        """Returns ``"reserved_bytes.all.peak"`` and the rest, where the pool is ``all``, else of one pool."""
        stats = {
            "allocation": Stat(self.allocation, self.peak_allocation, self.total_allocation),
            "segment": self.segment,
            "active": Stat(self.active, self.peak_active, self.total_allocation),
            "inactive_split": self.inactive_split,
            "allocated_bytes": Stat(self.allocated_bytes, self.peak_allocated_bytes, self.total_allocated_bytes),
            "reserved_bytes": self.reserved_bytes,
            "active_bytes": Stat(self.active_bytes, self.peak_active_bytes, self.total_allocated_bytes),
            "inactive_split_bytes": self.inactive_split_bytes,
            "requested_bytes": Stat(self.requested_bytes, self.peak_requested_bytes, self.total_requested_bytes),
        }
        return {key: value for name, stat in stats.items() for key, value in stat.named(f"{name}.{pool}").items()}


class ReservedTally(Tally):
    """Counts segments and what is reserved, and nothing of what happens within."""

    __slots__ = ()

    def allocate(self, size: int, requested: int) -> None:
        """Counts nothing."""

    release = allocate

    def change_inactive(self, blocks: int, size: int) -> None:
        """Counts nothing."""


class PeakTally(ReservedTally):
    """Counts what is allocated besides, and its peak."""

    __slots__ = ()

    def allocate(self, size: int, requested: int) -> None:
        """Counts the bytes of a block that was handed out."""
        self.allocated_bytes += size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes

    def release(self, size: int, requested: int) -> None:
        """Counts the bytes of a block that was given back."""
        self.allocated_bytes -= size
