"""What tests read from a trace, and the tensors that they record: real ones, or fake ones."""

from contextlib import nullcontext

import pytest
import torch

from autotrain_mem.rehearsal.fake_mode import QuickFakeMode
from autotrain_mem.types import Block, Trace

REAL_AND_FAKE = pytest.mark.parametrize("tensors", [nullcontext, QuickFakeMode], ids=["real", "fake"])


def sizes(trace: Trace) -> list[int]:
    """Bytes of every block, in the order of their births."""
    return [block.size_bytes for block in trace.blocks]


def live(trace: Trace) -> list[Block]:
    """Blocks that are alive at the end."""
    dead = {-number for number in trace.events if number < 0}
    return [block for number, block in enumerate(trace.blocks, 1) if number not in dead]


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
