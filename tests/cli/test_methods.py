"""From the command line to the trained model on a simulated card; other methods train in
``tests/drop_in/test_same_plan.py``, ``tests/recipes`` and ``tests/rehearsal/test_parity.py``."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotrain_mem.cli import word_problems
from autotrain_mem.support.units import MIB
from tests.place import Autofit, preferences, questions

pytestmark = pytest.mark.slow

STEPS = 2
SHARED = (
    f"--model tiny --gpu 300MiB --simulate --no_probe --json --max_steps {STEPS} --logging_steps 1 --save_strategy no "
    "--learning_rate 1e-3 --gradient_checkpointing false --fit lossless --forbid activation_offloading "
    "--output_dir trained/{method}"
)
OWN = {
    "sft": "--dataset alike_sft.jsonl.gz --dataset_streaming --max_length 48 --per_device_train_batch_size 4 "
    "--use_peft --load_in_4bit",
    "reward": "--dataset alike_pairs.jsonl --per_device_train_batch_size 4",
    "rloo": "--dataset alike_prompts.jsonl --reward_funcs my_rewards.short --max_completion_length 12 "
    "--per_device_train_batch_size 8 --optimizer_offload",
    "ppo": "--dataset alike_prompts.jsonl --reward_model_path trained/reward --response_length 12 "
    "--per_device_train_batch_size 4",
}
FILES = dict.fromkeys(OWN, "model.safetensors") | {"sft": "adapter_model.safetensors"}
LOGGED = {"sft": "loss", "rloo": "reward", "ppo": "objective/rlhf_reward", "reward": "accuracy"}
PEAK_TOLERANCE = 0.02
"""Every batch is the worst one: all rows are as long as the longest, less one token in every second."""
SEGMENT_BYTES = 20 * MIB
"""What requests from 1 to 10 MiB share: where a block comes to lie may take one more or less."""


@pytest.fixture(scope="module")
def train(autofit_once: Autofit, files: Path) -> Callable[[str], dict[str, Any]]:
    """Trains a method, and returns what the command printed on stdout."""
    _write_alike(files)

    def trained(method: str) -> dict[str, Any]:
        if method == "ppo" and not (files / "trained" / "reward").exists():
            trained("reward")
        ran = autofit_once(method, *f"{SHARED.format(method=method)} {OWN[method]}".split())
        assert ran.code == 0, ran.err
        told: dict[str, Any] = json.loads(ran.out)
        return told

    return trained


def _write_alike(folder: Path) -> None:
    """One problem, again and again; every second time its last character is missing, so that batches are padded."""
    pair = next(preferences(2, seed=0))
    question = next(questions(2, seed=0))
    problem = next(word_problems.problems(2, seed=0))
    rows = {"sft": (problem, "messages"), "pairs": (pair, "rejected"), "prompts": (question, "prompt")}
    for name, (row, column) in rows.items():
        *before, last = row[column]
        shorter = {**row, column: [*before, {**last, "content": last["content"][:-1]}]}
        word_problems.write_rows(folder / f"alike_{name}.jsonl", [row, shorter] * 16)
    packed = gzip.compress((folder / "alike_sft.jsonl").read_bytes())
    (folder / "alike_sft.jsonl.gz").write_bytes(packed)


@pytest.mark.parametrize("method", OWN)
def test_a_method_trains_with_the_peak_that_was_predicted_and_is_saved(
    method: str, train: Callable[[str], dict[str, Any]], files: Path
) -> None:
    from safetensors.torch import load_file

    told, folder = train(method), files / "trained" / method
    run = told["run"]
    assert told.keys() == {"schema", "plan", "run"}
    assert json.loads((folder / "plan.json").read_text()) == told["plan"]
    record = json.loads((folder / "run.json").read_text())
    assert (record["measured"], record["job"]["model"]) == (run["measured"], "tiny")
    assert run["steps"] == STEPS
    assert isinstance(run["last_loss"], float)
    assert f"'{LOGGED[method]}'" in (folder / "train.log").read_text()
    measured, reserved_bytes = run["measured"], run["predicted_peak_reserved_bytes"]
    assert measured["peak_allocated_bytes"] == pytest.approx(run["predicted_peak_bytes"], rel=PEAK_TOLERANCE)
    assert measured["peak_reserved_bytes"] == pytest.approx(reserved_bytes, abs=SEGMENT_BYTES)
    assert measured["num_alloc_retries"] == 0
    saved = load_file(folder / FILES[method])
    assert (folder / "tokenizer.json").is_file()
    if FILES[method] == "adapter_model.safetensors":  # an adapter's second factor is zero before its first step
        assert all(tensor.any() for name, tensor in saved.items() if "lora_B" in name)
    else:
        before = load_file(files / "tiny" / "model.safetensors")
        assert any(not tensor.equal(before[name]) for name, tensor in saved.items() if name in before)
    if method == "ppo":
        value_model = json.loads((folder / "value_model" / "config.json").read_text())
        assert value_model["architectures"] == ["Qwen2ForSequenceClassification"]
    if "--optimizer_offload" in OWN[method]:
        assert told["plan"]["estimate"]["owners_at_peak"].get("optimizer_state", 0) == 0
