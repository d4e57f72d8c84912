"""Chooses the cached block that serves a request, and those that are given back to the device.

After ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.13; each function names the one that it follows.
"""

from __future__ import annotations

from autotrain_mem.allocator import expandable
from autotrain_mem.allocator.blocks import Block, Pool
from autotrain_mem.allocator.state import AllocatorState


def free_block_for(state: AllocatorState, pool: Pool, size: int, stream: int) -> Block | None:
    """Takes the smallest free block that holds ``size`` out of its pool (``get_free_block``); None if there is none."""
    settings = state.settings
    if state.allowed_bytes is not None and _collects_garbage(state):  # saves most requests a call
        pool.get_free_blocks_calls += 1
    block = pool.at_least(size, stream)
    if block is None:
        return None
    if block.segment is not None:
        block = _best_expandable(pool, size, stream)
    limit = settings.max_split_bytes
    if limit is not None:
        if size < limit <= block.size:
            return None  # an oversized block is not for a smaller request
        if size >= limit and block.size >= size + settings.max_non_split_rounding_bytes:
            return None
    pool.remove(block)
    return block


def _best_expandable(pool: Pool, size: int, stream: int) -> Block:
    """Picks, in an expandable segment, the block that can grow to the least that is enough."""
    candidates = pool.from_size(size, stream)
    best = next(candidates)
    for block in candidates:
        if _expandable_size(block) >= _expandable_size(best):
            break
        best = block
    return best


def _expandable_size(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)


def release_available_blocks(state: AllocatorState, pool: Pool, size: int, stream: int) -> bool:
    """Gives back oversized blocks, no more than the request needs (``release_available_cached_blocks``).

    Only whole segments: with a limit below ``large_segment_size_mb`` the rest of a split one may be oversized too, and
    torch would hand the device an address in its middle.
    """
    limit = state.settings.max_split_bytes
    if limit is None:
        return False
    wanted = max(size, limit)
    block = pool.at_least(wanted, stream)
    if block is not None and _is_whole_segment(block):
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


def _is_whole_segment(block: Block) -> bool:
    return block.segment is None and not block.is_split


def release_cached_blocks(state: AllocatorState) -> None:
    """Gives back every segment and page that is wholly free (``release_cached_blocks``).

    torch waits for all streams first, as the callers do here (``synchronize_and_free_events``).
    """
    for pool in (state.large, state.small):
        grown = []
        for block in pool.free_blocks():
            if block.segment is not None:
                grown.append(block)
            elif not block.is_split:
                release_block(state, block)
        expandable.release_blocks(state, grown)


def release_block(state: AllocatorState, block: Block) -> None:
    """Gives a whole segment back to the device (``release_block``)."""
    block.pool.remove(block)
    limit = state.settings.max_split_bytes
    if limit is not None and block.size >= limit:
        state.oversize_segments.change(-1)
    state.change_reserved("segment_free", block.pool, block.address, block.size, block.stream)


def collect_garbage(state: AllocatorState) -> None:
    """Gives back cached segments older than their average, above the threshold (``garbage_collect_cached_blocks``).

    A block's age is the number of requests to its pool since it became free.
    """
    if not _collects_garbage(state):
        return
    assert state.allowed_bytes is not None
    threshold = int(state.settings.garbage_collection_threshold * state.allowed_bytes)
    to_reclaim = state.reserved_bytes - threshold
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


def _collects_garbage(state: AllocatorState) -> bool:
    return state.allowed_bytes is not None and state.settings.garbage_collection_threshold > 0.0
