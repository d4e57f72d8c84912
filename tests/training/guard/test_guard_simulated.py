"""On a simulated card that is full when a real one would be, a guarded training continues, and frees what it should."""

from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import Told, numbers
from tiny_trainers import trainer

from autotrain_mem.rehearsal.fake_run import Watch
from autotrain_mem.training.guard.attach import attach_guard
from autotrain_mem.types import LearnedLimits

WORKSPACES_BYTES = 2 * 8_519_680
"""cuBLAS's, forward and backward, which are kept for good (``rehearsal.cuda.workspaces``)."""


class Card:
    """Counts what is allocated, and is full at ``capacity_bytes``."""

    def __init__(self, capacity_bytes: float = float("inf")) -> None:
        self.capacity_bytes = capacity_bytes
        self.live: dict[int, int] = {}
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.then: list[int] = []
        """Allocated, each time that something was told."""

    def allocate(self, block: int, size_bytes: int, stream: int = 0) -> None:
        if self.allocated_bytes + size_bytes > self.capacity_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.live[block] = size_bytes
        self.allocated_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def free(self, block: int) -> None:
        self.allocated_bytes -= self.live.pop(block, 0)

    def empty_cache(self) -> None: ...

    def record_stream(self, block: int, stream: int) -> None: ...


def train_on(card: Card, method: str, model: Path, folder: Path, **changes: Any) -> tuple[Any, Told]:
    told, watch = Told(), Watch(card)
    settings = {"per_device_train_batch_size": 4, "max_steps": 3, **changes}
    with watch.cuda_semantics():
        made = trainer(method, model, folder, **settings)
        attach_guard(
            made,
            learned=LearnedLimits(),
            on_incident=lambda *said: (told(*said), card.then.append(card.allocated_bytes)),
        )
        watch.train(made)
    return made, told


def test_with_less_room_than_it_would_take_it_trains_the_same(qwen: Path, tmp_path: Path) -> None:
    roomy = Card()
    undisturbed, _ = train_on(roomy, "sft", qwen, tmp_path)
    # Weights, gradients and the state of AdamW are there whatever the batch.
    resting = 4 * 4 * sum(value.numel() for value in undisturbed.model.parameters())
    tight = Card(resting + 0.85 * (roomy.peak_bytes - resting))
    survived, told = train_on(tight, "sft", qwen, tmp_path)
    assert told.incidents
    assert numbers(survived, "loss") == pytest.approx(numbers(undisturbed, "loss"), rel=2e-3, abs=1e-5)
    held, room = (size - resting - WORKSPACES_BYTES for size in (max(tight.then), tight.capacity_bytes))
    assert held < 0.5 * room, "nothing of a failed try is held when it is told"


def test_a_row_that_is_too_large_waits_on_the_host(qwen: Path, tmp_path: Path) -> None:
    """One row at a time: there is nothing to split. The second one is the longest."""
    one = {"per_device_train_batch_size": 1, "loss_type": "nll", "max_steps": 2}
    roomy = Card()
    undisturbed, _ = train_on(roomy, "sft", qwen, tmp_path, **one)
    tight = Card(roomy.peak_bytes - 200_000)
    survived, told = train_on(tight, "sft", qwen, tmp_path, **one)
    assert set(told.remedies) == {"repeated with activations offloaded to the host"}
    assert numbers(survived, "loss") == pytest.approx(numbers(undisturbed, "loss"), rel=2e-3, abs=1e-5)
