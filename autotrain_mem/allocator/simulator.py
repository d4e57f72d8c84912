"""Simulates torch 2.13's CUDA caching allocator for one device.

Each method names the function that it follows in ``c10/cuda/CUDACachingAllocator.cpp: DeviceCachingAllocator``. Private
pools (CUDA graphs, ``torch.cuda.MemPool``), threads and time are not simulated. ``scripts/allocator_parity`` makes the
same calls to torch's compiled allocator and compares every answer.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from autotrain_mem.allocator import blocks, segments
from autotrain_mem.support.units import GIB, KIB, MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Holds the numbers of a failed request, and formats torch's message with them (``malloc``, ``format_size``)."""

    requested_bytes: int
    """Bytes that the program requested."""
    segment_bytes: int
    """Bytes that the allocator requested from the device."""
    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    allowed_bytes: int | None = None
    """The most that the process may reserve; None without a limit."""
    outside_bytes: int | None = None
    """Bytes that the process holds outside the allocator; None if no driver reports them."""

    def message(self) -> str:
        unallocated = self.reserved_bytes - self.allocated_bytes
        process = allowed = ""
        if self.outside_bytes is not None:
            in_use = format_size(self.reserved_bytes + self.outside_bytes)
            process = f"Including non-PyTorch memory, this process has {in_use} memory in use. "
        if self.allowed_bytes is not None:
            allowed = f"{format_size(self.allowed_bytes)} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.segment_bytes)}. GPU 0 has a total capacity of "
            f"{format_size(self.total_bytes)} of which {format_size(self.free_bytes)} is free. {process}{allowed}"
            f"Of the allocated memory {format_size(self.allocated_bytes)} is allocated by PyTorch, and "
            f"{format_size(unallocated)} is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
            "large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
            "documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-"
            "memory-usage-with-pytorch-cuda-alloc-conf)"
        )


class OutOfMemory(Exception):
    """Raised if a request fails. The text is torch's message."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message())
        self.refusal = refusal


def format_size(size_bytes: int) -> str:
    """Returns a size as torch writes it: ``format_size(21 * 2**20) == "21.00 MiB"``."""
    if size_bytes <= 1024:
        return f"{size_bytes} bytes"
    for unit, name in ((KIB, "KiB"), (MIB, "MiB")):
        if size_bytes <= unit * 1024:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes / GIB:.2f} GiB"


__all__ = ["CachingAllocator", "OutOfMemory"]


class CachingAllocator(segments.AllocatorState):
    """Simulates torch's allocator, with torch's calls; sizes and addresses are in bytes."""

    def malloc(self, requested_bytes: int, stream: int = 0) -> int:
        """Returns the address of memory for use on a stream; 0 for 0 bytes. Raises OutOfMemory if none is left."""
        if not requested_bytes:
            return 0
        if self._pending:
            self._finish_events(self._completed_events)
        size = blocks.round_size(requested_bytes)
        pool = self.small if size <= blocks.SMALL_BYTES else self.large
        if (block := segments.free_block_for(self, pool, size, stream)) is None:
            block = self._from_device(pool, size, stream, requested_bytes)
        return self._hand_out(block, pool, size, requested_bytes)

    def free(self, address: int) -> None:
        """Frees memory; address 0 has no effect. Raises KeyError for an address that is not allocated."""
        if not address:
            return
        block = self._allocated.pop(address)
        block.allocated = False
        self.allocated_bytes -= block.size
        if self.on_action is not None:
            self.on_action("free_requested", address, block.requested, block.stream)
        if block.stream_uses:
            block.pending_events = len(block.stream_uses)
            for stream in sorted(block.stream_uses):  # insert_events
                self._events += 1
                self._pending.setdefault(stream, deque()).append((self._events, block))
            block.stream_uses = None
        else:
            self._free_block(block)

    def record_stream(self, address: int, stream: int) -> None:
        """Keeps this memory in use after ``free`` until another stream is done with it (``recordStream``)."""
        block = self._allocated[address]
        if stream != block.stream:
            block.stream_uses = (block.stream_uses or set()) | {stream}

    def complete_events(self) -> None:
        """Marks all streams as done; the next request frees the blocks that they used (``process_events``)."""
        self._completed_events = self._events

    def empty_cache(self) -> None:
        """Releases all cached, unsplit memory (``emptyCache``)."""
        self.synchronize()
        segments.release_cached_blocks(self)

    def reset_peak_stats(self) -> None:
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def memory_stats(self) -> dict[str, int]:
        """Returns the simulated part of ``torch.cuda.memory_stats``."""
        return {
            "allocated_bytes.all.current": self.allocated_bytes,
            "allocated_bytes.all.peak": self.peak_allocated_bytes,
            "reserved_bytes.all.current": self.reserved_bytes,
            "reserved_bytes.all.peak": self.peak_reserved_bytes,
            "num_alloc_retries": self.num_alloc_retries,
            "num_ooms": self.num_ooms,
            "num_sync_all_streams": self.num_sync_all_streams,
            "num_device_alloc": self.num_device_alloc,
            "num_device_free": self.num_device_free,
        }

    def segments(self) -> list[dict[str, Any]]:
        """Returns what ``torch.cuda.memory._snapshot()["segments"]`` returns."""
        return blocks.shown_segments((*self.active_blocks(), *self.free_blocks()))

    def active_blocks(self) -> tuple[blocks.DeviceBlock, ...]:
        """Lists the blocks that are allocated, or still in use by another stream."""
        pending = {id(block): block for queue in self._pending.values() for _, block in queue}
        return (*self._allocated.values(), *pending.values())

    def free_blocks(self) -> list[blocks.DeviceBlock]:
        return [*self.small.free_blocks(), *self.large.free_blocks()]

    def _from_device(self, pool: blocks.Pool, size: int, stream: int, requested_bytes: int) -> blocks.DeviceBlock:
        """Allocates from the device; if that fails, releases cached memory and retries (``malloc``)."""
        segments.collect_garbage(self)
        asked = blocks.segment_size(self.settings, size)
        block = self._allocate_block(pool, size, stream, asked)
        if block is None and segments.release_available_blocks(self, pool, size, stream):
            block = self._allocate_block(pool, size, stream, asked)
        if block is None:
            self.synchronize()
            segments.release_cached_blocks(self)
            self.num_alloc_retries += 1
            block = self._allocate_block(pool, size, stream, asked)
        if block is None:
            self.num_ooms += 1
            if self.on_action is not None:
                self.on_action("oom", self.device.free_bytes, size, stream)
            raise OutOfMemory(self.refusal(requested_bytes, asked))
        return block

    def _allocate_block(self, pool: blocks.Pool, size: int, stream: int, asked: int) -> blocks.DeviceBlock | None:
        """Allocates a segment of ``asked`` bytes, or ``size`` bytes of an expandable one (``alloc_block``)."""
        if self.allowed_bytes is not None and self.reserved_bytes + asked > self.allowed_bytes:
            return None
        if self.settings.grows:
            return segments.allocate_expandable(self, pool, size, stream)
        if not self.device.take(asked):
            return None
        block = blocks.DeviceBlock(self.device.addresses(asked), asked, stream, pool)
        self.change_reserved("segment_alloc", block.address, asked, stream)
        return block

    def refusal(self, requested_bytes: int, asked: int) -> Refusal:
        """Describes a failed request for ``requested_bytes``, which needed ``asked`` bytes from the device."""
        return Refusal(
            requested_bytes=requested_bytes,
            segment_bytes=asked,
            total_bytes=self.total_bytes or 0,
            free_bytes=self.device.free_bytes,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            allowed_bytes=self.allowed_bytes,
            outside_bytes=self.outside_bytes,
        )

    def _hand_out(self, block: blocks.DeviceBlock, pool: blocks.Pool, size: int, requested_bytes: int) -> int:
        """Allocates a block and splits off a useful surplus (``alloc_found_block``, ``should_split``)."""
        surplus = block.size - size
        if pool.is_small or self.settings.grows:
            may_split = surplus >= blocks.MIN_BLOCK_BYTES
        else:
            limit = self.settings.max_split_bytes
            may_split = surplus > blocks.SMALL_BYTES and (limit is None or size < limit)
        if may_split:
            rest = blocks.DeviceBlock(block.address + size, surplus, block.stream, pool, block.segment)
            rest.put_between(block, block.next)
            block.size = size
            pool.insert(rest)
        block.allocated, block.requested = True, requested_bytes
        self._allocated[block.address] = block
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.on_action is not None:
            self.on_action("alloc", block.address, requested_bytes, block.stream)
        return block.address

    def _free_block(self, block: blocks.DeviceBlock) -> None:
        """Merges a block with free neighbours, and returns it to its pool (``free_block``)."""
        if self.on_action is not None:
            self.on_action("free_completed", block.address, block.requested, block.stream)
        for neighbour in (block.prev, block.next):
            if neighbour is not None and not neighbour.allocated:
                blocks.merge(block, neighbour)
        block.pool.insert(block)

    def synchronize(self) -> None:
        """Waits for all streams, and frees the blocks that they used (``synchronize_and_free_events``)."""
        self.num_sync_all_streams += 1
        self._finish_events(self._events)

    def _finish_events(self, last: int) -> None:
        for stream, queue in list(self._pending.items()):
            while queue and queue[0][0] <= last:
                _, block = queue.popleft()
                block.pending_events -= 1
                if block.pending_events == 0:
                    self._free_block(block)
            if not queue:
                del self._pending[stream]
