"""Models blocks and pools of free blocks, and computes the sizes of blocks and segments.

Follows ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.13; the constants are from ``c10/core/AllocatorConfig.h``.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from autotrain_mem.allocator.settings import AllocatorSettings

ADDRESS_BITS = 48
"""Device addresses have 48 bits. The key of a free block is its size, shifted left by 48 bits, plus its address."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Describes an expandable segment: a range of addresses that grows by pages (``ExpandableSegment``)."""

    address: int
    size: int
    page_bytes: int


@dataclass(slots=True, eq=False, repr=False)
class DeviceBlock:
    """Describes a part of a segment: allocated, free, or (in an expandable segment) not mapped."""

    address: int
    size: int
    stream: int
    pool: "Pool"
    segment: Segment | None = None
    """The expandable segment that contains it; None in a fixed-size segment."""
    mapped: bool = True
    requested: int = 0
    allocated: bool = False
    prev: "DeviceBlock | None" = None
    next: "DeviceBlock | None" = None
    stream_uses: set[int] | None = None
    """Other streams that use it (``record_stream``); None if there are none."""
    pending_events: int = 0
    """Number of uses by other streams that had not ended when it was freed."""
    gc_count_base: int = 0

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    @property
    def is_available(self) -> bool:
        """Returns whether it is neither allocated nor still in use by another stream."""
        return not (self.allocated or self.pending_events or self.stream_uses)

    def put_between(self, before: "DeviceBlock | None", after: "DeviceBlock | None") -> None:
        """Links this block between two others (``Block::splice``)."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


class Pool:
    """Holds either the free blocks of up to 1 MiB or the larger ones, sorted by stream, size and address."""

    __slots__ = ("_by_key", "_keys", "_unmapped", "get_free_blocks_calls", "is_small")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.get_free_blocks_calls = 0
        self._keys: dict[int, list[int]] = {}
        self._by_key: dict[int, DeviceBlock] = {}
        self._unmapped: dict[int, list[DeviceBlock]] = {}

    def insert(self, block: DeviceBlock) -> None:
        """Adds a block that became free (``insert_into_blocks``)."""
        block.gc_count_base = self.get_free_blocks_calls
        key = block.size << ADDRESS_BITS | block.address
        self._by_key[key] = block
        if (keys := self._keys.get(block.stream)) is None:
            self._keys[block.stream] = [key]
        else:
            insort(keys, key)

    def remove(self, block: DeviceBlock) -> None:
        """Removes a block before it is allocated, or before its size or address changes."""
        key = block.size << ADDRESS_BITS | block.address
        del self._by_key[key]
        keys = self._keys[block.stream]
        del keys[bisect_left(keys, key)]

    def at_least(self, size: int, stream: int) -> DeviceBlock | None:
        """Returns the smallest free block of a stream with at least this size; None if there is none."""
        if not (keys := self._keys.get(stream)):
            return None
        index = bisect_left(keys, size << ADDRESS_BITS)
        return self._by_key[keys[index]] if index < len(keys) else None

    def free_sizes(self, stream: int) -> list[int]:
        """Lists the bytes of a stream's free blocks, ascending."""
        return [key >> ADDRESS_BITS for key in self._keys.get(stream, ())]

    def has_room(self, size: int, surplus: int, stream: int) -> bool:
        """Returns whether the free blocks of at least this size have at least ``surplus`` bytes beyond it, in total."""
        smallest = size << ADDRESS_BITS
        for key in reversed(self._keys.get(stream, ())):
            if key < smallest:
                return False
            surplus -= (key >> ADDRESS_BITS) - size
            if surplus <= 0:
                return True
        return False

    def from_size(self, size: int, stream: int) -> Iterator[DeviceBlock]:
        """Yields the free blocks of a stream with at least this size, smallest first."""
        keys = self._keys.get(stream, [])
        for index in range(bisect_left(keys, size << ADDRESS_BITS), len(keys)):
            yield self._by_key[keys[index]]

    def below(self, size: int, stream: int) -> Iterator[DeviceBlock]:
        """Yields the free blocks of a stream below this size, largest first. The caller may remove the current one."""
        keys = self._keys.get(stream, [])
        for key in reversed(keys[: bisect_left(keys, size << ADDRESS_BITS)]):
            yield self._by_key[key]

    def free_blocks(self) -> list[DeviceBlock]:
        """Lists all free blocks, sorted by stream, size and address."""
        return [self._by_key[key] for stream in sorted(self._keys) for key in self._keys[stream]]

    def insert_unmapped(self, block: DeviceBlock) -> None:
        insort(self._unmapped.setdefault(block.stream, []), block, key=lambda each: each.address)

    def remove_unmapped(self, block: DeviceBlock) -> None:
        self._unmapped[block.stream].remove(block)

    def unmapped(self, stream: int) -> list[DeviceBlock]:
        """Lists a stream's unmapped ranges, lowest address first."""
        return self._unmapped.get(stream, [])


def merge(block: DeviceBlock, neighbour: DeviceBlock) -> None:
    """Merges a free neighbour into a block if both or neither are mapped (``try_merge_blocks``)."""
    if neighbour.allocated or neighbour.pending_events or neighbour.stream_uses or neighbour.mapped != block.mapped:
        return
    pool = block.pool
    if neighbour.mapped:
        pool.remove(neighbour)
    else:
        pool.remove_unmapped(neighbour)
    if block.prev is neighbour:
        block.address = neighbour.address
        block.prev = neighbour.prev
        if block.prev is not None:
            block.prev.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.prev = block
    block.size += neighbour.size


def shown_segments(blocks: Iterable[DeviceBlock]) -> list[dict[str, Any]]:
    """Returns blocks as ``torch.cuda.memory._snapshot()["segments"]`` does: by segment, lowest address first.

    Follows ``DeviceCachingAllocator::snapshot``; an expandable segment has one entry for each mapped range.
    """
    segments = []
    heads = [block for block in blocks if block.prev is None or not block.prev.mapped]
    for head in sorted(heads, key=lambda head: head.address):
        shown: list[dict[str, Any]] = []
        block: DeviceBlock | None = head
        while block is not None and block.mapped:
            free = "active_pending_free" if block.pending_events else "inactive"
            state = "active_allocated" if block.allocated else free
            sizes = {"address": block.address, "size": block.size, "requested_size": block.requested}
            shown.append({**sizes, "state": state, "frames": []})
            block = block.next
        segment = {
            "device": 0,
            "address": head.address,
            "total_size": sum(each["size"] for each in shown),
            "allocated_size": sum(each["size"] for each in shown if each["state"] == "active_allocated"),
            "active_size": sum(each["size"] for each in shown if each["state"] != "inactive"),
            "requested_size": sum(each["requested_size"] for each in shown if each["state"] != "inactive"),
            "stream": head.stream,
            "segment_type": "small" if head.pool.is_small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": head.segment is not None,
            "frames": [],
            "blocks": shown,
        }
        segments.append(segment)
    return segments


MIN_BLOCK_BYTES = 512
"""``kMinBlockSize``: every block is a multiple of this."""
SMALL_BYTES = 1 << 20
"""``kSmallSize``: the small pool serves requests up to this size."""
SMALL_SEGMENT_BYTES = 2 << 20
"""``kSmallBuffer``: size of the small pool's segments."""
MIN_LARGE_BYTES = 10 << 20
"""``kMinLargeAlloc``: a request of at least this size gets a segment of its own."""
ROUND_LARGE_BYTES = 2 << 20
"""``kRoundLarge``: the size of a segment for one request is rounded up to a multiple of this."""


def round_size(requested_bytes: int) -> int:
    """Returns the size of the block for a request: ``round_size(513) == 1024``."""
    return -(-requested_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES or MIN_BLOCK_BYTES


def segment_size(settings: AllocatorSettings, block_bytes: int) -> int:
    """Returns the bytes to request from the device if no cached block is large enough (``get_allocation_size``)."""
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MIN_LARGE_BYTES:
        return settings.large_segment_bytes
    return -(-block_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
