"""Grows expandable segments: addresses for the whole device, and memory behind them page by page.

After ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.13; each function names the one that it follows.
"""

from __future__ import annotations

from autotrain_mem.allocator.blocks import Block, Pool, Segment, merge
from autotrain_mem.allocator.rounding import SMALL_SEGMENT_BYTES
from autotrain_mem.allocator.state import AllocatorState

_UNLIMITED_ADDRESS_BYTES = 1 << 44
"""The addresses of a segment on a device without a size: more than any device's memory."""


def allocate_block(state: AllocatorState, pool: Pool, size: int, stream: int) -> Block | None:
    """Makes a block of at least ``size`` (``try_allocate_expandable_block``); None when memory is out."""
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
    """Gives back every page that is wholly free (the expandable part of ``release_blocks``)."""
    for block in blocks:
        _unmap(state, block)
        if block.prev is None and block.next is None:  # nothing of the segment is mapped any more
            block.pool.remove_unmapped(block)


def _find(state: AllocatorState, pool: Pool, size: int, stream: int) -> Block:
    """Finds the lowest address where ``size`` fits into free and unmapped stretches (``find_expandable_block``)."""
    for unmapped in pool.unmapped(stream):
        before = unmapped.prev
        candidate = before if before is not None and before.is_available else unmapped
        if _has_room(candidate, size):
            return candidate
    page = SMALL_SEGMENT_BYTES if pool.is_small else state.settings.large_segment_bytes
    total = state.total_bytes
    wanted = _UNLIMITED_ADDRESS_BYTES if total is None else max(total + total // 8, size)
    segment = Segment(state.device.addresses(-(-wanted // page) * page), -(-wanted // page) * page, page)
    block = Block(segment.address, segment.size, stream, pool, segment, mapped=False)
    pool.insert_unmapped(block)
    return block


def _has_room(block: Block | None, size: int) -> bool:
    room = 0
    while room < size and block is not None and block.is_available:
        room += block.size
        block = block.next
    return room >= size


def _map(state: AllocatorState, block: Block, size: int) -> bool:
    """Puts pages behind the first ``size`` bytes of an unmapped block (``map_block``); False when memory is out."""
    segment, pool = block.segment, block.pool
    assert segment is not None
    mapped = -(-size // segment.page_bytes) * segment.page_bytes
    if not state.device.take(mapped):
        return False
    address = block.address
    pool.remove_unmapped(block)
    block.mapped = True
    if mapped < block.size:
        rest = Block(address + mapped, block.size - mapped, block.stream, pool, segment, mapped=False)
        rest.put_between(block, block.next)
        block.size = mapped
        pool.insert_unmapped(rest)
    for neighbour in (block.prev, block.next):
        if neighbour is not None:
            merge(block, neighbour)
    pool.insert(block)
    state.change_reserved("segment_map", pool, address, mapped, block.stream)
    return True


def _unmap(state: AllocatorState, block: Block) -> None:
    """Takes the whole pages from behind a free block (``unmap_block``); what is left at its ends stays free."""
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
        rest = Block(block.address, before, block.stream, pool, segment)
        rest.put_between(block.prev, block)
        pool.insert(rest)
    if after:
        rest = Block(end, after, block.stream, pool, segment)
        rest.put_between(block, block.next)
        pool.insert(rest)
    block.address, block.size, block.mapped = begin, end - begin, False
    for neighbour in (block.prev, block.next):
        if neighbour is not None:
            merge(block, neighbour)
    pool.insert_unmapped(block)
    state.change_reserved("segment_unmap", pool, begin, end - begin, block.stream)
