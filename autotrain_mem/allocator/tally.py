"""The allocator's statistics, under torch's names (``torch.cuda.memory_stats``).

One tally for each pool and one for all; ``c10/core/CachingDeviceAllocator.h: DeviceStats``. Of each statistic the
current value, its peak and the sum of all increases are kept; what was ever freed is their difference.
"""

from __future__ import annotations

_NAMES = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)


class Stat:
    """One statistic (``c10/core/Allocator.h: Stat``)."""

    __slots__ = ("allocated", "current", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = 0

    def change(self, amount: int) -> None:
        """Add or take away (``increase_stat``, ``decrease_stat``)."""
        self.current += amount
        if amount > 0:
            self.allocated += amount
            self.peak = max(self.peak, self.current)

    def named(self, name: str) -> dict[str, int]:
        """Torch's four figures of it."""
        return {
            f"{name}.current": self.current,
            f"{name}.peak": self.peak,
            f"{name}.allocated": self.allocated,
            f"{name}.freed": self.allocated - self.current,
        }


class Tally:
    """The statistics of one pool, or of all.

    Those that change with every call are plain numbers, since a call on each would double the cost of a simulation:
    ``active`` and ``active_bytes`` follow ``allocation`` and ``allocated_bytes`` up at once, and down when the block is
    free for others.
    """

    __slots__ = (
        "active",
        "active_bytes",
        "allocated_bytes",
        "allocation",
        "inactive_split",
        "inactive_split_bytes",
        "peak_active",
        "peak_active_bytes",
        "peak_allocated_bytes",
        "peak_allocation",
        "peak_requested_bytes",
        "requested_bytes",
        "reserved_bytes",
        "segment",
        "total_allocated_bytes",
        "total_allocation",
        "total_requested_bytes",
    )

    def __init__(self) -> None:
        self.allocation = self.allocated_bytes = self.requested_bytes = self.active = self.active_bytes = 0
        self.peak_allocation = self.peak_allocated_bytes = self.peak_requested_bytes = 0
        self.peak_active = self.peak_active_bytes = 0
        self.total_allocation = self.total_allocated_bytes = self.total_requested_bytes = 0
        self.segment, self.reserved_bytes = Stat(), Stat()
        self.inactive_split, self.inactive_split_bytes = Stat(), Stat()

    def allocate(self, size: int, requested: int) -> None:
        """A block was handed out."""
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
        """A block was given back, and is free for others at once."""
        self.allocation -= 1
        self.active -= 1
        self.allocated_bytes -= size
        self.active_bytes -= size
        self.requested_bytes -= requested

    def free(self, size: int) -> None:
        """A block was given back, while other streams still use it."""
        self.allocation -= 1
        self.allocated_bytes -= size

    def deactivate(self, size: int, requested: int) -> None:
        """Its last use is over."""
        self.active -= 1
        self.active_bytes -= size
        self.requested_bytes -= requested

    def change_inactive(self, blocks: int, size: int) -> None:
        """Free blocks beside others came, went or changed their size."""
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
        """``torch.cuda.reset_peak_memory_stats``."""
        self.peak_allocation, self.peak_active = self.allocation, self.active
        self.peak_allocated_bytes, self.peak_active_bytes = self.allocated_bytes, self.active_bytes
        self.peak_requested_bytes = self.requested_bytes
        for stat in (self.segment, self.reserved_bytes, self.inactive_split, self.inactive_split_bytes):
            stat.peak = stat.current

    def stats(self) -> dict[str, Stat]:
        """All statistics, in torch's order."""
        counted = {
            "allocation": (self.allocation, self.peak_allocation, self.total_allocation),
            "active": (self.active, self.peak_active, self.total_allocation),
            "allocated_bytes": (self.allocated_bytes, self.peak_allocated_bytes, self.total_allocated_bytes),
            "active_bytes": (self.active_bytes, self.peak_active_bytes, self.total_allocated_bytes),
            "requested_bytes": (self.requested_bytes, self.peak_requested_bytes, self.total_requested_bytes),
        }
        return {name: _stat(*counted[name]) if name in counted else getattr(self, name) for name in _NAMES}


def _stat(current: int, peak: int, allocated: int) -> Stat:
    stat = Stat()
    stat.current, stat.peak, stat.allocated = current, peak, allocated
    return stat


def memory_stats(tallies: dict[str, Tally]) -> dict[str, int]:
    """``"reserved_bytes.all.peak"`` and the rest, from the tallies of ``all``, ``small_pool`` and ``large_pool``."""
    return {
        key: value
        for name in _NAMES
        for kind, tally in tallies.items()
        for key, value in tally.stats()[name].named(f"{name}.{kind}").items()
    }
