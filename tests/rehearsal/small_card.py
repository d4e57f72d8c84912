"""A card that counts what is allocated, in blocks of 512 bytes, and reserves nothing beyond."""

import torch


class SmallCard:
    """A recorder's device; full at ``capacity_bytes``."""

    def __init__(self, capacity_bytes: int = 1 << 60) -> None:
        self._capacity_bytes = capacity_bytes
        self._live: dict[int, int] = {}
        self.allocated_bytes = 0
        self.emptied = 0
        self.streams: dict[int, int] = {}
        """Of each block."""
        self.stream_uses: list[tuple[int, int]] = []
        """Block and stream."""

    def allocate(self, block: int, size_bytes: int, stream: int = 0) -> None:
        rounded = -(-size_bytes // 512) * 512
        if self.allocated_bytes + rounded > self._capacity_bytes:
            raise torch.OutOfMemoryError(f"Tried to allocate {size_bytes} bytes.")
        self._live[block] = rounded
        self.allocated_bytes += rounded
        self.streams[block] = stream

    def free(self, block: int) -> None:
        """A block that was refused is ignored."""
        self.allocated_bytes -= self._live.pop(block, 0)

    def empty_cache(self) -> None:
        self.emptied += 1

    def record_stream(self, block: int, stream: int) -> None:
        self.stream_uses.append((block, stream))
