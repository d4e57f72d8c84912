"""``--dry_run`` and ``--export``: one file on stdout that its tool could read, everything else on stderr."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.place import Autofit

PLANNED = ("--model", "tiny", "--gpu", "300MiB", "--dataset", "data.jsonl", "--max_length", "64", "--use_peft")
ONE_REHEARSAL = ("--per_device_train_batch_size", "2", "--gradient_checkpointing", "true")


def test_an_export_is_all_there_is_on_stdout_and_names_what_lora_adapts(autofit: Autofit) -> None:
    ran = autofit("sft", *PLANNED, *ONE_REHEARSAL, "--data_seed", "3", "--export", "axolotl")
    said = yaml.safe_load(ran.out)
    assert ran.code == 0
    assert (said["base_model"], said["micro_batch_size"], said["sequence_len"]) == ("tiny", 2, 64)
    assert said["lora_target_modules"] == ["q_proj", "v_proj"]
    assert said["output_dir"] == "tiny-SFT"
    assert "# - data_seed 3: Axolotl has no key for it here\n" in ran.out
    assert "settings" in ran.err


def test_a_dry_run_is_the_config_the_command_and_the_environment(autofit: Autofit) -> None:
    ran = autofit("sft", *PLANNED, *ONE_REHEARSAL, "--expandable_segments", "--dry_run", "--json")
    said = json.loads(ran.out)
    assert ran.code == 0
    assert said["config"]["per_device_train_batch_size"] == 2
    assert said["command"][-4:] == ["-m", "trl.scripts.sft", "--config", "trl.yaml"]
    assert said["environment"] == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("plan ppo --export axolotl", "No file for Axolotl is written yet for PPO"),
        ("plan sft --export trl --json", "--export trl and --json"),
        ("plan sft --export trl --dry_run", "--export trl and --dry_run"),
        ("plan sft --dry_run --gpu all", "--gpu all"),
        ("plan sft --export torchtune", "takes trl, accelerate, axolotl, llamafactory"),
        ("estimate sft --export trl", "autofit plan METHOD ... --export TOOL"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_planned(autofit: Autofit, line: str, reason: str) -> None:
    ran = autofit(*line.split(), "--model", "there-is-none")
    assert ran.code == 2
    assert ran.out == ""
    assert reason in " ".join(ran.err.split())
