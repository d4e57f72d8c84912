"""The CUDA caching allocator of one device, in pure Python: what torch 2.13 would do with the same calls.

After ``c10/cuda/CUDACachingAllocator.cpp: DeviceCachingAllocator``; each method names the function that it follows.
Left out: private pools (CUDA graphs, ``torch.cuda.MemPool``), other devices, threads. ``scripts/allocator_parity``
plays the same calls through torch's compiled allocator and compares every answer.

Time does not pass here: a block that another stream used (``record_stream``) is free for others once that stream is
known to be done, which is said by :meth:`CachingAllocator.complete_events` and found out by the next request after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from autotrain_mem.allocator import cached, expandable, history
from autotrain_mem.allocator.blocks import Block, Pool, merge
from autotrain_mem.allocator.out_of_memory import OutOfMemory, Refusal
from autotrain_mem.allocator.rounding import (
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    round_size_by,
    segment_size,
)
from autotrain_mem.allocator.settings import AllocatorSettings
from autotrain_mem.allocator.state import AllocatorState, OnAction
from autotrain_mem.allocator.tally import memory_stats

__all__ = ["CachingAllocator", "OutOfMemory"]


class CachingAllocator(AllocatorState):
    """Requests and frees in torch's terms; sizes and addresses are bytes.

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
        super().__init__(capacity_bytes, settings, total_bytes, on_action)
        self._outside_bytes = outside_bytes
        self._allocated: dict[int, Block] = {}
        self._pending: dict[int, deque[tuple[int, Block]]] = {}
        self._events = self._completed_events = 0
        if self.settings.per_process_memory_fraction < 1.0:
            self.set_memory_fraction(self.settings.per_process_memory_fraction)
        self._rounds_to_blocks = not any(self.settings.roundup_power2_divisions)

    # -- what a program calls --------------------------------------------------------------------------------------

    def malloc(self, requested_bytes: int, stream: int = 0) -> int:
        """Memory of a size, for use on a stream; returns its address. Of nothing the address is 0.

        Raises:
            OutOfMemory: there is not so much, not even after everything cached was given back.
        """
        if not requested_bytes:
            return 0
        if self._pending:
            self._process_events()
        if not self._rounds_to_blocks:
            size = round_size_by(self.settings, requested_bytes)
        elif requested_bytes <= MIN_BLOCK_BYTES:
            size = MIN_BLOCK_BYTES
        else:
            size = (requested_bytes + 511) & -512
        pool = self.small if size <= SMALL_BYTES else self.large
        block = cached.free_block_for(self, pool, size, stream)
        if block is None:
            block = self._from_device(pool, size, stream, requested_bytes)
        return self._hand_out(block, pool, size, requested_bytes)

    def free(self, address: int) -> None:
        """Give memory back; raises KeyError for an address that is not allocated, other than that of nothing."""
        if not address:
            return
        block = self._allocated.pop(address)
        block.allocated = False
        size = block.size
        if self.on_action is not None:
            self.on_action("free_requested", address, block.requested, block.stream)
        if self.settings.max_split_bytes is not None and size >= self.settings.max_split_bytes:
            self.oversize_allocations.change(-1)
        if block.stream_uses:
            self.all.free(size)
            block.pool.tally.free(size)
            self._wait_for(block, block.stream_uses)
        else:
            self.all.release(size, block.requested)
            block.pool.tally.release(size, block.requested)
            self._free_block(block)

    def record_stream(self, address: int, stream: int) -> None:
        """Another stream uses this memory (``recordStream``): once freed, it waits until that stream is done."""
        block = self._allocated[address]
        if stream != block.stream:
            block.stream_uses = (block.stream_uses or set()) | {stream}

    def complete_events(self) -> None:
        """All streams are done with what they were using; the next request finds out (``process_events``)."""
        self._completed_events = self._events

    def empty_cache(self) -> None:
        """Give back to the device whatever is cached and not split (``emptyCache``)."""
        self.synchronize()
        cached.release_cached_blocks(self)

    def set_memory_fraction(self, fraction: float) -> None:
        """``setMemoryFraction``; raises ValueError for a device without a size."""
        if self.total_bytes is None:
            raise ValueError("a fraction of a device without a size is no limit: give total_bytes")
        self.allowed_bytes = int(fraction * self.total_bytes) if fraction < 1.0 else None

    # -- what it holds ---------------------------------------------------------------------------------------------

    @property
    def allocated_bytes(self) -> int:
        """``torch.cuda.memory_allocated``."""
        return self.all.allocated_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """``torch.cuda.max_memory_allocated``."""
        return self.all.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """``torch.cuda.max_memory_reserved``."""
        return self.all.reserved_bytes.peak

    def reset_peak_stats(self) -> None:
        """``torch.cuda.reset_peak_memory_stats``."""
        for tally in (self.all, self.small.tally, self.large.tally):
            tally.reset_peaks()
        for stat in (self.oversize_allocations, self.oversize_segments):
            stat.peak = stat.current

    def memory_stats(self) -> dict[str, int]:
        """``torch.cuda.memory_stats``: the same names, of the same calls the same numbers."""
        tallies = {"all": self.all, "small_pool": self.small.tally, "large_pool": self.large.tally}
        return {
            **memory_stats(tallies),
            "num_alloc_retries": self.num_alloc_retries,
            "num_ooms": self.num_ooms,
            "num_oom_rejections": self.num_oom_rejections,
            "num_sync_all_streams": self.num_sync_all_streams,
            "num_device_alloc": self.num_device_alloc,
            "num_device_free": self.num_device_free,
            "max_split_size": -1 if self.settings.max_split_bytes is None else self.settings.max_split_bytes,
            **self.oversize_allocations.named("oversize_allocations"),
            **self.oversize_segments.named("oversize_segments"),
        }

    def segments(self) -> list[dict[str, Any]]:
        """``torch.cuda.memory._snapshot()["segments"]``."""
        return history.segments(self, self.active_blocks())

    def active_blocks(self) -> Iterable[Block]:
        """Blocks that are allocated, or still in use by another stream."""
        pending = {id(block): block for queue in self._pending.values() for _, block in queue}
        return (*self._allocated.values(), *pending.values())

    # -- a new block -----------------------------------------------------------------------------------------------

    def _from_device(self, pool: Pool, size: int, stream: int, requested_bytes: int) -> Block:
        """No cached block serves: ask the device, give back what is cached, ask again (``malloc``)."""
        cached.collect_garbage(self)
        asked = segment_size(self.settings, size)
        self._reject_hopeless(requested_bytes, asked)
        block = self._allocate_block(pool, size, stream, asked)
        if block is None and cached.release_available_blocks(self, pool, size, stream):
            block = self._allocate_block(pool, size, stream, asked)
        if block is None:
            self.synchronize()
            cached.release_cached_blocks(self)
            self.num_alloc_retries += 1
            block = self._allocate_block(pool, size, stream, asked)
        if block is None:
            raise self._refused(requested_bytes, size, asked, stream)
        return block

    def _allocate_block(self, pool: Pool, size: int, stream: int, asked: int) -> Block | None:
        """``alloc_block``: a segment of ``asked`` bytes, or ``size`` bytes of an expandable one."""
        if self.allowed_bytes is not None and self.reserved_bytes + asked > self.allowed_bytes:
            return None
        if self.settings.expandable_segments:
            return expandable.allocate_block(self, pool, size, stream)
        if not self.device.take(asked):
            return None
        block = Block(self.device.addresses(asked), asked, stream, pool)
        for tally in (self.all, pool.tally):
            tally.segment.change(1)
            tally.reserved_bytes.change(asked)
        if self.settings.max_split_bytes is not None and asked >= self.settings.max_split_bytes:
            self.oversize_segments.change(1)
        self.num_device_alloc += 1
        if self.on_action is not None:
            self.on_action("segment_alloc", block.address, asked, stream)
        return block

    def _reject_hopeless(self, requested_bytes: int, asked: int) -> None:
        """``throw_on_cudamalloc_oom``, where no fraction is in its way."""
        if not self.settings.throw_on_cudamalloc_oom or self.total_bytes is None:
            return
        wanted = self.reserved_bytes + asked
        if wanted > self.total_bytes and (self.allowed_bytes is None or wanted <= self.allowed_bytes):
            self.num_oom_rejections += 1
            raise OutOfMemory(replace(self._refusal(requested_bytes, asked), is_rejected=True))

    def _refused(self, requested_bytes: int, size: int, asked: int, stream: int) -> OutOfMemory:
        refusal = self._refusal(requested_bytes, asked)
        self.num_ooms += 1
        if self.on_action is not None:
            self.on_action("oom", refusal.free_bytes, size, stream)
        return OutOfMemory(refusal)

    def _refusal(self, requested_bytes: int, asked: int) -> Refusal:
        return Refusal(
            requested_bytes=requested_bytes,
            segment_bytes=asked,
            total_bytes=self.total_bytes or 0,
            free_bytes=self.device.free_bytes,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            allowed_bytes=self.allowed_bytes,
            outside_bytes=self._outside_bytes,
        )

    # -- blocks change hands ---------------------------------------------------------------------------------------

    def _hand_out(self, block: Block, pool: Pool, size: int, requested_bytes: int) -> int:
        """``alloc_found_block``: cut off what is too much, if it is enough to be of use (``should_split``)."""
        surplus = block.size - size
        was_split = block.prev is not None or block.next is not None
        if surplus and self._may_split(pool, size, surplus):
            rest = Block(block.address + size, surplus, block.stream, pool, block.segment)
            after = block.next
            block.size, block.next = size, rest
            rest.prev, rest.next = block, after
            if after is not None:
                after.prev = rest
            pool.insert(rest)
            if block.segment is None:
                self._shrink_inactive(pool, size) if was_split else self._add_inactive(pool, 1, surplus)
        elif was_split and block.segment is None:
            self._add_inactive(pool, -1, -block.size)
        size = block.size
        block.allocated, block.requested = True, requested_bytes
        self._allocated[block.address] = block
        self.all.allocate(size, requested_bytes)
        pool.tally.allocate(size, requested_bytes)
        if self.settings.max_split_bytes is not None and size >= self.settings.max_split_bytes:
            self.oversize_allocations.change(1)
        if self.on_action is not None:
            self.on_action("alloc", block.address, requested_bytes, block.stream)
        return block.address

    def _may_split(self, pool: Pool, size: int, surplus: int) -> bool:
        if pool.is_small or self.settings.expandable_segments:
            return surplus >= MIN_BLOCK_BYTES
        limit = self.settings.max_split_bytes
        return surplus > SMALL_BYTES and (limit is None or size < limit)

    def _shrink_inactive(self, pool: Pool, size: int) -> None:
        self.all.inactive_split_bytes.change(-size)
        pool.tally.inactive_split_bytes.change(-size)

    def _add_inactive(self, pool: Pool, blocks: int, size: int) -> None:
        self.all.change_inactive(blocks, size)
        pool.tally.change_inactive(blocks, size)

    def _free_block(self, block: Block) -> None:
        """``free_block``: merged with free neighbours, it goes back to its pool."""
        pool = block.pool
        if self.on_action is not None:
            self.on_action("free_completed", block.address, block.requested, block.stream)
        merged, absorbed = 0, 0
        for neighbour in (block.prev, block.next):
            if neighbour is not None and not neighbour.allocated and (subsumed := merge(block, neighbour)):
                merged, absorbed = merged + 1, absorbed + subsumed
        pool.insert(block)
        if block.segment is None:
            is_split = block.prev is not None or block.next is not None
            blocks = is_split - merged
            change = is_split * block.size - absorbed
            if blocks or change:
                self._add_inactive(pool, blocks, change)

    # -- other streams ---------------------------------------------------------------------------------------------

    def _wait_for(self, block: Block, streams: set[int]) -> None:
        """``insert_events``: it stays active until each of these streams is done."""
        block.pending_events, block.stream_uses = len(streams), None
        for stream in sorted(streams):
            self._events += 1
            self._pending.setdefault(stream, deque()).append((self._events, block))

    def _process_events(self) -> None:
        """``process_events``."""
        self._finish_events(self._completed_events)

    def synchronize(self) -> None:
        """``synchronize_and_free_events``: wait for all streams, and free what they used."""
        self.num_sync_all_streams += 1
        self._finish_events(self._events)

    def _finish_events(self, last: int) -> None:
        for stream, queue in list(self._pending.items()):
            while queue and queue[0][0] <= last:
                _, block = queue.popleft()
                block.pending_events -= 1
                if block.pending_events == 0:
                    self.all.deactivate(block.size, block.requested)
                    block.pool.tally.deactivate(block.size, block.requested)
                    self._free_block(block)
            if not queue:
                del self._pending[stream]
