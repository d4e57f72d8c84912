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
