"""Rows come in the same order after a new start, grouped by length or not."""

from pathlib import Path
from typing import Any

import tiny_trainers

from autotrain_mem.training.process.train import keep_order

STEPS = 9
"""Two more than an epoch has."""


def _rows(model: Path, folder: Path, resume: str | None = None) -> list[Any]:
    """What each step trains on."""
    grouped = {"train_sampling_strategy": "group_by_length", "save_strategy": "steps", "save_steps": STEPS - 1}
    made, seen = tiny_trainers.trainer("sft", model, folder, max_steps=STEPS, **grouped), []
    keep_order(made)
    step = made.training_step

    def watched(module: Any, inputs: Any, *args: Any) -> Any:
        seen.append(inputs["input_ids"].tolist())
        return step(module, inputs, *args)

    made.training_step = watched
    made.train(resume_from_checkpoint=resume)
    return seen


def test_a_run_grouped_by_length_goes_on_with_its_own_rows_in_a_later_epoch(qwen: Path, tmp_path: Path) -> None:
    whole = _rows(qwen, tmp_path)
    rest = _rows(qwen, tmp_path / "other", str(tmp_path / f"checkpoint-{STEPS - 1}"))
    assert whole[STEPS - 1 :] == rest
    assert whole[:2] != whole[7:]  # another order in another epoch
