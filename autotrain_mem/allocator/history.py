"""Shows what the allocator holds, in the form of torch's own snapshots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autotrain_mem.allocator.blocks import Block
from autotrain_mem.allocator.state import AllocatorState


def segments(state: AllocatorState, active: Iterable[Block]) -> list[dict[str, Any]]:
    """``torch.cuda.memory._snapshot()["segments"]``: one entry for each stretch of memory, lowest address first.

    ``DeviceCachingAllocator::snapshot``; an expandable segment is one entry for each stretch that is mapped.

    Args:
        active: Blocks that are allocated, or still in use by another stream.
    """
    blocks = (*active, *state.small.free_blocks(), *state.large.free_blocks())
    heads = [block for block in blocks if block.prev is None or not block.prev.mapped]
    return [_segment(head) for head in sorted(heads, key=lambda head: head.address)]


def _segment(head: Block) -> dict[str, Any]:
    blocks, block = [], head
    while True:
        blocks.append(_block(block))
        if block.next is None or not block.next.mapped:
            break
        block = block.next
    return {
        "device": 0,
        "address": head.address,
        "total_size": sum(each["size"] for each in blocks),
        "allocated_size": sum(each["size"] for each in blocks if each["state"] == "active_allocated"),
        "active_size": sum(each["size"] for each in blocks if each["state"] != "inactive"),
        "requested_size": sum(each["requested_size"] for each in blocks if each["state"] != "inactive"),
        "stream": head.stream,
        "segment_type": "small" if head.pool.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": head.segment is not None,
        "frames": [],
        "blocks": blocks,
    }


def _block(block: Block) -> dict[str, Any]:
    free = "active_pending_free" if block.pending_events else "inactive"
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested,
        "state": "active_allocated" if block.allocated else free,
        "frames": [],
    }
