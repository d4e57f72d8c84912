"""Counts pinned host memory as torch's allocator takes it: each tensor in a block of a power of two, and none returned.

A block that is free again serves requests of its own size alone, and stays with the process
(``aten/src/ATen/core/CachingHostAllocator.h: allocate, get_free_block``). In newer torch ``PYTORCH_ALLOC_CONF`` can
forbid the rounding (``pinned_max_round_threshold_mb``), which is not heeded.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable


class PinnedMemory:
    """Holds what one process takes of its host's memory, so that the device can copy to and from it by itself.

    Example: a tensor of 14.7 MB takes 16.8 MB, one of 17.4 MB takes 33.6 MB.
    """

    def __init__(self) -> None:
        self._alive: Counter[int] = Counter()
        self._most: Counter[int] = Counter()
        self._kept_bytes = 0

    def take(self, holder: object, size_bytes: int) -> None:
        """A tensor is made that lives as long as ``holder``."""
        block = block_bytes(size_bytes)
        self._alive[block] += 1
        self._most[block] = max(self._most[block], self._alive[block])
        weakref.finalize(holder, self._alive.subtract, [block])

    def keep(self, sizes: Iterable[int]) -> None:
        """Counts tensors of these sizes as there for good; the last call counts."""
        self._kept_bytes = sum(map(block_bytes, sizes))

    @property
    def peak_bytes(self) -> int:
        """Returns what the process has taken so far, in bytes."""
        return self._kept_bytes + sum(block * count for block, count in self._most.items())


class UnpinnedMemory:
    """Holds what one process takes of its host's memory besides, to the byte; what is freed goes back.

    Example: a master copy of 4 MB and two moments of it are 12 MB at once.
    """

    def __init__(self) -> None:
        self._alive_bytes = self.peak_bytes = 0

    def take(self, holder: object, size_bytes: int) -> Callable[[], object]:
        """A tensor is made that lives as long as ``holder``; returns what ends it before, once."""
        self._alive_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self._alive_bytes)
        return weakref.finalize(holder, self._give_back, size_bytes)

    def _give_back(self, size_bytes: int) -> None:
        self._alive_bytes -= size_bytes


def block_bytes(size_bytes: int) -> int:
    """Rounds up to a power of two (``c10/util/llvmMathExtras.h: PowerOf2Ceil``); nothing takes nothing."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0
