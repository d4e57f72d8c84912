"""Holds what the allocator knows: settings, pools, statistics and the memory of a device with a size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from autotrain_mem.allocator.blocks import DeviceBlock, Pool
from autotrain_mem.allocator.settings import AllocatorSettings

FIRST_ADDRESS = 0x7F0000000000
"""Where a Linux process finds CUDA's first segments, more or less; nothing depends on it but the look of a snapshot."""
GRANULARITY_BYTES = 2 << 20
"""Physical memory comes in pages of 2 MiB (``cuMemGetAllocationGranularity``)."""

OnAction = Callable[[str, int, int, int], None]
"""Hears of every action: ``on_action(action, address, size, stream)``, with the actions' names in torch's history."""


@dataclass(slots=True)
class DeviceMemory:
    """Holds what is left of a device (``cudaMalloc``, ``cuMemCreate``), and addresses that were not given out yet."""

    capacity_bytes: int | None
    """What the allocator can have in all; None for no end."""
    taken_bytes: int = 0
    _next_address: int = FIRST_ADDRESS

    @property
    def free_bytes(self) -> int:
        """Says what ``cudaMemGetInfo`` calls free; 0 where there is no end."""
        return 0 if self.capacity_bytes is None else self.capacity_bytes - self.taken_bytes

    def take(self, size: int) -> bool:
        """Takes physical memory; False where it is out."""
        if self.capacity_bytes is not None and self.taken_bytes + size > self.capacity_bytes:
            return False
        self.taken_bytes += size
        return True

    def addresses(self, size: int) -> int:
        """Gives a range of addresses that nothing else has (``cuMemAddressReserve``): above all others."""
        address = self._next_address
        self._next_address += -(-size // GRANULARITY_BYTES) * GRANULARITY_BYTES
        return address


class AllocatorState:
    """Holds the members of ``c10/cuda/CUDACachingAllocator.cpp: DeviceCachingAllocator``, which its functions share.

    Args:
        capacity_bytes: What the allocator can have of the device in all; None for no end.
        settings: As ``PYTORCH_ALLOC_CONF`` would set them.
        total_bytes: The device's whole memory, of which a fraction is a share; by default the capacity.
        outside_bytes: What the process holds beside, for the message of a refusal; None leaves it out.
        on_action: Hears of everything that happens, for a history; None for speed.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        settings: AllocatorSettings | None = None,
        *,
        total_bytes: int | None = None,
        outside_bytes: int | None = None,
        on_action: OnAction | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.device = DeviceMemory(capacity_bytes)
        self.total_bytes = capacity_bytes if total_bytes is None else total_bytes
        self.outside_bytes = outside_bytes
        self.on_action = on_action
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        """As ``torch.cuda.memory_allocated``, ``max_memory_allocated`` and their like for what is reserved."""
        self.small = Pool(is_small=True)
        self.large = Pool(is_small=False)
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = self.num_oom_rejections = 0
        self.allowed_bytes: int | None = None
        if self.settings.per_process_memory_fraction < 1.0:
            self.set_memory_fraction(self.settings.per_process_memory_fraction)
        self._rounds_to_blocks = not any(self.settings.roundup_power2_divisions)
        self._allocated: dict[int, DeviceBlock] = {}
        self._pending: dict[int, deque[tuple[int, DeviceBlock]]] = {}
        self._events = self._completed_events = 0

    def set_memory_fraction(self, fraction: float) -> None:
        """Follows ``setMemoryFraction``; raises ValueError for a device without a size."""
        if self.total_bytes is None:
            raise ValueError("a fraction of a device without a size is no limit: give total_bytes")
        self.allowed_bytes = int(fraction * self.total_bytes) if fraction < 1.0 else None

    def change_reserved(self, action: str, address: int, size: int, stream: int) -> None:
        """Counts memory that came from the device or went back to it, by the action's name in torch's history."""
        if action in ("segment_alloc", "segment_map"):
            self.num_device_alloc += 1
            self.reserved_bytes += size
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        else:
            self.num_device_free += 1
            self.reserved_bytes -= size
            self.device.taken_bytes -= size
        if self.on_action is not None:
            self.on_action(action, address, size, stream)
