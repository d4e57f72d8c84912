"""Holds what the allocator knows: settings, pools, counters and the device's memory; no rule of torch's is in here."""

from __future__ import annotations

from collections.abc import Callable

from autotrain_mem.allocator.blocks import Pool
from autotrain_mem.allocator.device_memory import DeviceMemory
from autotrain_mem.allocator.settings import AllocatorSettings
from autotrain_mem.allocator.tally import Stat, Tally

OnAction = Callable[[str, int, int, int], None]
"""Hears of every action: ``on_action(action, address, size, stream)``, with the actions' names in torch's history."""


class AllocatorState:
    """The members of ``c10/cuda/CUDACachingAllocator.cpp: DeviceCachingAllocator``, which all of its functions share.

    Args:
        capacity_bytes: What the allocator can have of the device in all; None for no end.
        settings: As ``PYTORCH_ALLOC_CONF`` would set them.
        total_bytes: The device's whole memory, of which a fraction is a share; by default the capacity.
        on_action: Hears of everything that happens, for a history; None for speed.
    """

    def __init__(
        self,
        capacity_bytes: int | None,
        settings: AllocatorSettings | None,
        total_bytes: int | None,
        on_action: OnAction | None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.device = DeviceMemory(capacity_bytes)
        self.total_bytes = capacity_bytes if total_bytes is None else total_bytes
        self.on_action = on_action
        self.all = Tally()
        self.small = Pool(is_small=True)
        self.large = Pool(is_small=False)
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = self.num_oom_rejections = 0
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()
        self.allowed_bytes: int | None = None

    @property
    def reserved_bytes(self) -> int:
        """``torch.cuda.memory_reserved``."""
        return self.all.reserved_bytes.current
