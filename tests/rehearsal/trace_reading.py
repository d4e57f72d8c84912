"""What tests read from a trace, and the tensors that they record: real ones, or fake ones."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from autotrain_mem.spec import Block, Trace

REAL_AND_FAKE = pytest.mark.parametrize(
    "tensors", [nullcontext, lambda: FakeTensorMode(allow_non_fake_inputs=True)], ids=["real", "fake"]
)


def sizes(trace: Trace) -> list[int]:
    """Bytes of every block, in the order of their births."""
    return [block.size_bytes for block in trace.blocks]


def live(trace: Trace) -> list[Block]:
    """Blocks that are alive at the end."""
    dead = {-number for number in trace.events if number < 0}
    return [block for number, block in enumerate(trace.blocks, 1) if number not in dead]


def peak_bytes(trace: Trace) -> int:
    """Most bytes that were alive at once."""
    current = highest = 0
    for _, sign, block in trace.walk():
        current += sign * block.size_bytes
        highest = max(highest, current)
    return highest
