"""Holds the allocator's state, selects cached blocks, releases cached memory and grows expandable segments.

Each function names the one that it follows in ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.13.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from autotrain_mem.allocator.blocks import SMALL_SEGMENT_BYTES, DeviceBlock, Pool, Segment, merge
from autotrain_mem.allocator.settings import AllocatorSettings

FIRST_ADDRESS = 0x7F0000000000
"""Roughly CUDA's first address in a Linux process; only snapshots show it."""
GRANULARITY_BYTES = 2 << 20
"""Physical memory comes in pages of 2 MiB (``cuMemGetAllocationGranularity``)."""

OnAction = Callable[[str, int, int, int], None]
"""Called for every action: ``on_action(action, address, size, stream)``, with torch's names of actions."""


@dataclass(slots=True)
class DeviceMemory:
    """Models a device's memory (``cudaMalloc``, ``cuMemCreate``) and addresses (``cuMemAddressReserve``)."""

    capacity_bytes: int | None
    """The most that the allocator can reserve; None for no limit."""
    taken_bytes: int = 0
    _next_address: int = FIRST_ADDRESS

    @property
    def free_bytes(self) -> int:
        """Returns the free bytes of ``cudaMemGetInfo``; 0 without a limit."""
        return 0 if self.capacity_bytes is None else self.capacity_bytes - self.taken_bytes

    def take(self, size: int) -> bool:
        """Allocates physical memory; returns False when out of memory."""
        if self.capacity_bytes is not None and self.taken_bytes + size > self.capacity_bytes:
            return False
        self.taken_bytes += size
        return True

    def addresses(self, size: int) -> int:
        """Reserves a range of ``size`` bytes above all earlier ranges, and returns its first address."""
        address = self._next_address
        self._next_address += -(-size // GRANULARITY_BYTES) * GRANULARITY_BYTES
        return address


class AllocatorState:
    """Holds the members of ``DeviceCachingAllocator``.

    Args:
        capacity_bytes: The most that the allocator can reserve on the device; None for no limit.
        total_bytes: The device's memory, to which a memory fraction refers; by default the capacity.
        outside_bytes: Bytes that the process holds outside the allocator, for the out-of-memory message.
        on_action: Receives every action, for a history; None is faster.
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
        """``torch.cuda.memory_reserved`` and its maximum; the two above are ``memory_allocated`` and its maximum."""
        self.small = Pool(is_small=True)
        self.large = Pool(is_small=False)
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = 0
        self.allowed_bytes: int | None = None
        if self.settings.per_process_memory_fraction < 1.0:
            self.set_memory_fraction(self.settings.per_process_memory_fraction)
        self._allocated: dict[int, DeviceBlock] = {}
        self._pending: dict[int, deque[tuple[int, DeviceBlock]]] = {}
        self._events = self._completed_events = 0

    def set_memory_fraction(self, fraction: float) -> None:
        """Limits a process's share of the device (``setMemoryFraction``). Raises ValueError if its size is unknown."""
        if self.total_bytes is None:
            raise ValueError("a fraction of a device of unknown size is not a limit: give total_bytes")
        self.allowed_bytes = int(fraction * self.total_bytes) if fraction < 1.0 else None

    def change_reserved(self, action: str, address: int, size: int, stream: int) -> None:
        """Counts memory taken from or returned to the device; ``action`` is the name in torch's history."""
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


def free_block_for(state: AllocatorState, pool: Pool, size: int, stream: int) -> DeviceBlock | None:
    """Takes the smallest sufficient free block from its pool; None if there is none (``get_free_block``)."""
    settings = state.settings
    if state.allowed_bytes is not None and settings.garbage_collection_threshold > 0.0:
        pool.get_free_blocks_calls += 1
    if (block := pool.at_least(size, stream)) is None:
        return None
    if block.segment is not None:  # the block that can grow to the smallest size
        candidates = pool.from_size(size, stream)
        block = next(candidates)
        for other in candidates:
            if _expandable_size(other) >= _expandable_size(block):
                break
            block = other
    if (limit := settings.max_split_bytes) is not None:
        if size < limit <= block.size:
            return None  # an oversized block never serves a smaller request
        if size >= limit and block.size >= size + settings.max_non_split_rounding_bytes:
            return None
    pool.remove(block)
    return block


def _expandable_size(block: DeviceBlock) -> int:
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)


def release_available_blocks(state: AllocatorState, pool: Pool, size: int, stream: int) -> bool:
    """Releases just enough oversized blocks for a request (``release_available_cached_blocks``).

    Only whole segments are released. torch lacks that check, and fails if ``max_split_size_mb`` is below
    ``large_segment_size_mb`` and the rest of a split segment is oversized.
    """
    if (limit := state.settings.max_split_bytes) is None:
        return False
    wanted = max(size, limit)
    if (block := pool.at_least(wanted, stream)) is not None and _is_whole_segment(block):
        release_block(state, block)
        return True
    released = 0
    for smaller in list(pool.below(wanted, stream)):
        if released >= wanted or smaller.size < limit:
            break
        if _is_whole_segment(smaller):
            released += smaller.size
            release_block(state, smaller)
    return released >= wanted


def _is_whole_segment(block: DeviceBlock) -> bool:
    return block.segment is None and not block.is_split


def release_cached_blocks(state: AllocatorState) -> None:
    """Releases all free segments and pages (``release_cached_blocks``). The caller synchronizes the streams first."""
    for pool in (state.large, state.small):
        grown = []
        for block in pool.free_blocks():
            if block.segment is not None:
                grown.append(block)
            elif not block.is_split:
                release_block(state, block)
        for block in grown:
            _unmap(state, block)
            if not block.is_split:  # the whole segment is unmapped
                block.pool.remove_unmapped(block)


def release_block(state: AllocatorState, block: DeviceBlock) -> None:
    """Releases a whole segment to the device (``release_block``)."""
    block.pool.remove(block)
    state.change_reserved("segment_free", block.address, block.size, block.stream)


def collect_garbage(state: AllocatorState) -> None:
    """Releases cached segments of at least average age, down to the threshold (``garbage_collect_cached_blocks``).

    A block's age is the number of requests to its pool since it became free.
    """
    if state.allowed_bytes is None or state.settings.garbage_collection_threshold <= 0.0:
        return
    to_reclaim = state.reserved_bytes - int(state.settings.garbage_collection_threshold * state.allowed_bytes)
    calls = state.large.get_free_blocks_calls
    freeable = [block for block in state.large.free_blocks() if _is_whole_segment(block)]
    total_age = sum(calls - block.gc_count_base for block in freeable)
    reclaimed = 0
    while freeable and reclaimed < to_reclaim:
        average = total_age / len(freeable)
        for block in [each for each in freeable if calls - each.gc_count_base >= average]:
            reclaimed += block.size
            total_age -= calls - block.gc_count_base
            freeable.remove(block)
            release_block(state, block)


_UNLIMITED_ADDRESS_BYTES = 1 << 44
"""Bytes of addresses that a segment reserves on a device of unknown size: more than any device's memory."""


def allocate_expandable(state: AllocatorState, pool: Pool, size: int, stream: int) -> DeviceBlock | None:
    """Maps and returns a block of at least ``size`` (``try_allocate_expandable_block``); None when out of memory."""
    # find_expandable_block: the lowest address with enough adjacent free and unmapped bytes
    candidate = following = None
    for unmapped in pool.unmapped(stream):
        before = unmapped.prev
        first = before if before is not None and before.is_available else unmapped
        room, following = 0, first
        while room < size and following is not None and following.is_available:
            room, following = room + following.size, following.next
        if room >= size:
            candidate = first
            break
    if candidate is None:
        page = SMALL_SEGMENT_BYTES if pool.is_small else state.settings.large_segment_bytes
        total = state.total_bytes
        wanted = _UNLIMITED_ADDRESS_BYTES if total is None else max(total + total // 8, size)
        whole_pages = -(-wanted // page) * page
        segment = Segment(state.device.addresses(whole_pages), whole_pages, page)
        candidate = DeviceBlock(segment.address, segment.size, stream, pool, segment, mapped=False)
        pool.insert_unmapped(candidate)
    if not candidate.mapped and not _map(state, candidate, min(candidate.size, size)):
        return None
    while candidate.size < size:
        following = candidate.next
        assert following is not None, "a candidate and the blocks after it have enough bytes"
        if not _map(state, following, min(size - candidate.size, following.size)):
            return None
        candidate = following
    pool.remove(candidate)
    return candidate


def _map(state: AllocatorState, block: DeviceBlock, size: int) -> bool:
    """Maps pages to the first ``size`` bytes of an unmapped block (``map_block``); returns False when out of memory."""
    segment, pool = block.segment, block.pool
    assert segment is not None
    mapped = -(-size // segment.page_bytes) * segment.page_bytes
    if not state.device.take(mapped):
        return False
    address = block.address
    pool.remove_unmapped(block)
    block.mapped = True
    if mapped < block.size:
        rest = DeviceBlock(address + mapped, block.size - mapped, block.stream, pool, segment, mapped=False)
        rest.put_between(block, block.next)
        block.size = mapped
        pool.insert_unmapped(rest)
    for neighbour in (block.prev, block.next):
        if neighbour is not None:
            merge(block, neighbour)
    pool.insert(block)
    state.change_reserved("segment_map", address, mapped, block.stream)
    return True


def _unmap(state: AllocatorState, block: DeviceBlock) -> None:
    """Unmaps the whole pages of a free block (``unmap_block``); its ends stay mapped and free."""
    segment, pool = block.segment, block.pool
    assert segment is not None
    page = segment.page_bytes
    begin = segment.address + -(-(block.address - segment.address) // page) * page
    end = segment.address + (block.address + block.size - segment.address) // page * page
    if begin >= end:
        return
    pool.remove(block)
    before, after = begin - block.address, block.address + block.size - end
    if before:
        rest = DeviceBlock(block.address, before, block.stream, pool, segment)
        rest.put_between(block.prev, block)
        pool.insert(rest)
    if after:
        rest = DeviceBlock(end, after, block.stream, pool, segment)
        rest.put_between(block, block.next)
        pool.insert(rest)
    block.address, block.size, block.mapped = begin, end - begin, False
    for neighbour in (block.prev, block.next):
        if neighbour is not None:
            merge(block, neighbour)
    pool.insert_unmapped(block)
    state.change_reserved("segment_unmap", begin, end - begin, block.stream)
