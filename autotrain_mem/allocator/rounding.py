"""How large a block the CUDA caching allocator makes for a request."""

from __future__ import annotations

MIN_BLOCK_BYTES = 512
"""``c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize``: every block is a multiple of this."""


def round_size(requested_bytes: int) -> int:
    """Bytes of the block for a request (``CUDACachingAllocator.cpp: round_size``): ``round_size(513) == 1024``."""
    if requested_bytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    return -(-requested_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
