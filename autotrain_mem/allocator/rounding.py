"""Says how large a block, and how large a segment, the CUDA caching allocator makes for a request.

Constants of torch 2.13: ``c10/core/AllocatorConfig.h``; functions: ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from autotrain_mem.allocator.settings import AllocatorSettings

MIN_BLOCK_BYTES = 512
"""``kMinBlockSize``: every block is a multiple of this."""
SMALL_BYTES = 1 << 20
"""``kSmallSize``: requests up to this size are served by the small pool."""
SMALL_SEGMENT_BYTES = 2 << 20
"""``kSmallBuffer``: the segments of the small pool."""
MIN_LARGE_BYTES = 10 << 20
"""``kMinLargeAlloc``: from this size on a request gets a segment of its own."""
ROUND_LARGE_BYTES = 2 << 20
"""``kRoundLarge``: to a multiple of which such a segment is rounded up."""


def round_size(requested_bytes: int) -> int:
    """Returns the bytes of the block for a request, without further settings: ``round_size(513) == 1024``."""
    if requested_bytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    return -(-requested_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def round_size_by(settings: AllocatorSettings, requested_bytes: int) -> int:
    """Returns the bytes of the block for a request where ``roundup_power2_divisions`` is set (``round_size``).

    ``roundup_power2_next_division``: of 1200 in 4 parts, 1280.
    """
    divisions = settings.divisions_for(requested_bytes)
    if divisions <= 1 or requested_bytes <= MIN_BLOCK_BYTES * divisions:
        return round_size(requested_bytes)
    floor = 1 << (requested_bytes.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    return -(-requested_bytes // step) * step


def segment_size(settings: AllocatorSettings, block_bytes: int) -> int:
    """Returns the bytes asked of the device for a block that no cached one can serve (``get_allocation_size``)."""
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MIN_LARGE_BYTES:
        return settings.large_segment_bytes
    return -(-block_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
