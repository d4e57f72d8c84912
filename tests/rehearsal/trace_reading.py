"""What tests read from a trace, and the tensors that they record: real ones, or fake ones."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers.utils import import_utils

from autotrain_mem.rehearsal.fake_mode import QuickFakeMode
from autotrain_mem.rehearsal.known_values import KnownValues
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.types import Block, Trace

REAL_AND_FAKE = pytest.mark.parametrize("tensors", [nullcontext, QuickFakeMode], ids=["real", "fake"])


def sizes(trace: Trace) -> list[int]:
    """Bytes of every block, in the order of their births."""
    return [block.size_bytes for block in trace.blocks]


def live(trace: Trace) -> list[Block]:
    """Blocks that are alive at the end."""
    dead = {-number for number in trace.events if number < 0}
    return [block for number, block in enumerate(trace.blocks, 1) if number not in dead]


def recorded_step(
    build: Callable[[], Any],
    batch: dict[str, torch.Tensor],
    rules: AbstractContextManager[Any],
    step: Callable[[Any, dict[str, Any]], Any],
    *,
    fake: bool,
) -> tuple[Trace, Any, Any]:
    """Builds a model under some rules and records a step with it: the record, the step's result, and the model."""
    mode = QuickFakeMode() if fake else nullcontext()
    with mode, rules, patch.object(import_utils, "is_fake_tensor", lambda value: False):
        values = KnownValues(mode) if fake else None
        model = build()
        recorder = Recorder(values.run) if values else Recorder()
        recorder.adopt_model(model)
        arrived = values.arrive(batch) if values else batch
        recorder.adopt_batch(arrived.values())
        with recorder.recording():
            result = step(model, arrived)
    return recorder.trace(), result, model


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
