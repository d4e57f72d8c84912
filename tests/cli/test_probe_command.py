"""The probe as a user meets it: a line before the training, and what it measured in the plan."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.place import Autofit

pytestmark = pytest.mark.slow

TRAIN = shlex.split(
    "sft --model tiny --dataset data.jsonl --gpu 300MiB --simulate --max_length 32 --per_device_train_batch_size 8 "
    "--gradient_checkpointing false --fit lossless --max_steps 1 --save_strategy no --json"
)


def test_a_plan_is_tried_once_before_it_trains(autofit: Autofit, files: Path) -> None:
    tried = autofit(*TRAIN, "--output_dir", "tried")
    assert tried.code == 0, tried.err
    (probe,) = json.loads(tried.out)["plan"]["experience"]["probes"]
    assert (probe["fits"], probe["row_tokens"], probe["refused"]) == (True, 32, "")
    predicted = json.loads(tried.out)["plan"]["estimate"]["required_bytes"]
    assert probe["measured"]["peak_reserved_bytes"] == pytest.approx(predicted, rel=0.05)
    assert "probe: 8 x 1 rows of 32 tokens: needs " in tried.err
    assert not (files / "tried" / ".probe").exists()
    assert not [*(files / "tried").glob("checkpoint-*")]
    again = autofit("sft", "--plan", "tried", "--simulate", "--output_dir", "again", "--json")
    assert again.code == 0, again.err
    assert "probing" not in again.err  # it was confirmed
