"""Expandable segments: addresses for the whole device, and memory behind them page by page.

After ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.13; each function names the one that it follows.
"""

from __future__ import annotations

from autotrain_mem.allocator.blocks import Block, Pool, Segment, merge
from autotrain_mem.allocator.rounding import SMALL_SEGMENT_BYTES
from autotrain_mem.allocator.state import AllocatorState

_UNLIMITED_ADDRESS_BYTES = 1 << 44
"""The addresses of a segment on a device without a size: more than any device's memory."""


def allocate_block(state: AllocatorState, pool: Pool, size: int, stream: int) -> Block | None:
    """``try_allocate_expandable_block``: a block of at least ``size``, out of its pool; None when memory is out."""
    candidate = _find(state, pool, size, stream)
    if not candidate.mapped and not _map(state, candidate, min(candidate.size, size)):
        return None
    while candidate.size < size:
        following = candidate.next
        assert following is not None, "a candidate has room for what is asked"
        if not _map(state, following, min(size - candidate.size, following.size)):
            return None
        candidate = following
    pool.remove(candidate)
    return candidate


def release_blocks(state: AllocatorState, blocks: list[Block]) -> None:
    """The expandable part of ``release_blocks``: give back every page that is wholly free."""
    for block in blocks:
        _unmap(state, block)
        if block.prev is None and block.next is None:  # nothing of the segment is mapped any more
            block.pool.remove_unmapped(block)


def _find(state: AllocatorState, pool: Pool, size: int, stream: int) -> Block:
    """``find_expandable_block``: the lowest address where ``size`` fits into free and unmapped stretches."""
    for unmapped in pool.unmapped(stream):
        before = unmapped.prev
        candidate = before if before is not None and before.is_available else unmapped
        if _has_room(candidate, size):
            return candidate
    page = SMALL_SEGMENT_BYTES if pool.is_small else state.settings.large_segment_bytes
    total = state.total_bytes
    wanted = _UNLIMITED_ADDRESS_BYTES if total is None else max(total + total // 8, size)
    segment = Segment(state.device.addresses(-(-wanted // page) * page), -(-wanted // page) * page, page)
    block = Block(segment.address, segment.size, stream, pool, segment)
    block.mapped = False
    pool.insert_unmapped(block)
    return block


def _has_room(block: Block | None, size: int) -> bool:
    room = 0
    while room < size and block is not None and block.is_available:
        room += block.size
        block = block.next
    return room >= size


def _map(state: AllocatorState, block: Block, size: int) -> bool:
    """``map_block``: put pages behind the first ``size`` bytes of an unmapped block; False when memory is out."""
    segment, pool = block.segment, block.pool
    assert segment is not None
    mapped = -(-size // segment.page_bytes) * segment.page_bytes
    if not state.device.take(mapped):
        return False
    address = block.address
    pool.remove_unmapped(block)
    block.mapped = True
    if mapped < block.size:
        rest = Block(address + mapped, block.size - mapped, block.stream, pool, segment)
        rest.mapped = False
        rest.put_between(block, block.next)
        block.size = mapped
        pool.insert_unmapped(rest)
    for neighbour in (block.prev, block.next):
        if neighbour is not None:
            merge(block, neighbour)
    pool.insert(block)
    _change_reserved(state, pool, mapped)
    state.num_device_alloc += 1
    if state.on_action is not None:
        state.on_action("segment_map", address, mapped, block.stream)
    return True


def _unmap(state: AllocatorState, block: Block) -> None:
    """``unmap_block``: take the whole pages from behind a free block; what is left at its ends stays free."""
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
        stays = Block(block.address, before, block.stream, pool, segment)
        stays.put_between(block.prev, block)
        pool.insert(stays)
    if after:
        stays = Block(end, after, block.stream, pool, segment)
        stays.put_between(block, block.next)
        pool.insert(stays)
    block.address, block.size, block.mapped = begin, end - begin, False
    for neighbour in (block.prev, block.next):
        if neighbour is not None:
            merge(block, neighbour)
    pool.insert_unmapped(block)
    state.device.give_back(end - begin)
    _change_reserved(state, pool, begin - end)
    state.num_device_free += 1
    if state.on_action is not None:
        state.on_action("segment_unmap", begin, end - begin, block.stream)


def _change_reserved(state: AllocatorState, pool: Pool, change: int) -> None:
    for tally in (state.all, pool.tally):
        tally.reserved_bytes.change(change)
