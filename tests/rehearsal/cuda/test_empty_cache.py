"""Every way in which the libraries empty a CUDA device's cache leaves one event, on a machine without CUDA."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate.utils import memory

from autotrain_mem.rehearsal.cuda.rules import recorded_empty_cache
from autotrain_mem.rehearsal.trace.phases import follow
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.spec import Phase
from autotrain_mem.spec.trace import CACHE_EMPTIED


def trl_empty_cache() -> None:
    from trl.experimental.utils import empty_cache

    empty_cache()


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.cuda.empty_cache(),
        lambda: memory.clear_device_cache(),
        lambda: transformers.trainer.clear_device_cache(),
        lambda: memory.release_memory(None),
        lambda: accelerate.Accelerator(cpu=True).free_memory(),
        trl_empty_cache,
    ],
    ids=["torch", "accelerate", "transformers", "release_memory", "free_memory", "trl"],
)
def test_a_call_is_recorded_once(call: Callable[[], Any]) -> None:
    recorder = Recorder()
    with recorded_empty_cache(recorder):
        call()
    call()
    assert list(recorder.trace().events) == [CACHE_EMPTIED]


class Half(torch.nn.Module):
    """The least that a Trainer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).mean()}


@pytest.mark.parametrize(("every", "expected"), [(1, 4), (2, 2), (None, 0)])
def test_torch_empty_cache_steps_empties_between_forward_and_backward(
    every: int | None, expected: int, tmp_path: pathlib.Path
) -> None:
    """transformers empties in each micro-step of every n-th step, before its backward pass."""
    trainer = transformers.Trainer(
        model=Half(),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            max_steps=2,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            torch_empty_cache_steps=every,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=[{"x": torch.ones(1)}] * 4,
    )
    recorder = Recorder()
    follow(trainer, recorder)
    with recorded_empty_cache(recorder), recorder.recording():
        trainer.train()
    trace = recorder.trace()
    starts = [index for index, _ in trace.phase_starts]
    phases = [
        [phase for index, phase in trace.phase_starts if index <= at][-1]
        for at, event in enumerate(trace.events)
        if event == CACHE_EMPTIED and at >= starts[1]
    ]
    assert phases == [Phase.FORWARD] * expected
