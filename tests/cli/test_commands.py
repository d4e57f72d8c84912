"""What each command prints: the keys of its JSON, and help that needs no GPU and no network."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autotrain_mem.errors import MissingExtraError
from autotrain_mem.worker.client import Worker
from tests.place import Autofit

ESTIMATE = ["estimate", "sft", "--model", "tiny", "--gpu", "300MiB", "--max_length", "64", "--json"]
PLAN = ["plan", "sft", "--model", "tiny", "--gpu", "300MiB", "--dataset", "data.jsonl", "--max_length", "64", "--json"]
ONE_REHEARSAL = ("--per_device_train_batch_size", "2", "--gradient_checkpointing", "true")
"""Pins that leave a search nothing to choose, for tests of something else."""


def test_an_estimate_is_one_object_whose_figures_add_up(autofit: Autofit) -> None:
    ran = autofit(*ESTIMATE)
    found = json.loads(ran.out)
    assert ran.code == 0
    assert found["knobs"]["max_length"] == 64
    assert found["peak_reserved_bytes"] == found["reserved"]["native"]["peak_reserved_bytes"]
    assert found["required_bytes"] == found["peak_reserved_bytes"] + found["non_torch_bytes"]
    assert all(mode["peak_reserved_bytes"] > found["peak_allocated_bytes"] for mode in found["reserved"].values())
    assert sum(found["owners_at_peak"].values()) == found["peak_allocated_bytes"]
    assert max(phase["peak_bytes"] for phase in found["phases"]) == found["peak_allocated_bytes"]
    assert found["fits"]
    assert found["budget_bytes"] < 300 * 2**20
    larger = json.loads(autofit(*ESTIMATE, "--per_device_train_batch_size", "64", "--gpu", "20MiB").out)
    assert (larger["knobs"]["per_device_train_batch_size"], larger["fits"]) == (64, False)


def test_a_plan_is_one_object_on_stdout_and_its_rehearsals_are_told_on_stderr(autofit: Autofit) -> None:
    ran = autofit(*PLAN, "--effective_batch_size", "4")
    found = json.loads(ran.out)
    assert ran.code == 0
    assert found["effective_batch_size"] == 4
    assert found["knobs"]["max_length"] == 64
    assert ran.err.count("rehearsing: ") == len(found["attempts"]) > 0
    assert 0 < found["data"]["truncated_tokens_fraction"] < 1


@pytest.mark.parametrize("data", ["data.jsonl", "data.json", "splits", "text.jsonl"])
def test_data_of_every_kind_are_planned_for(data: str, autofit: Autofit) -> None:
    ran = autofit(*shlex.split("plan sft --model tiny --gpu 300MiB --json --dataset"), data, *ONE_REHEARSAL)
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["data"]["truncated_tokens_fraction"] == 0


def test_a_model_without_tokenizer_is_planned_for_at_a_given_length(autofit: Autofit) -> None:
    line = "plan sft --model no_tokenizer --gpu 300MiB --json --dataset data.jsonl --max_length 64"
    ran = autofit(*shlex.split(line), *ONE_REHEARSAL)
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["data"] is None


def test_gpus_lists_at_least_25_cards_with_their_sources(autofit: Autofit) -> None:
    found = json.loads(autofit("gpus", "--json").out)
    assert len(found["gpus"]) >= 25
    assert all(card["source"] and card["total_bytes"] > 0 for card in found["gpus"])
    table = autofit("gpus").out.split()
    assert all(card["name"] in table for card in found["gpus"])


OF_THE_METHOD = {
    "sft": "--packing",
    "plan reward": "--center_rewards_coefficient",
    "estimate dpo": "--precompute_ref_log_probs",
    "grpo": "--reward_funcs",
    "plan rloo": "--reward_model_name_or_path",
    "ppo": "--response_length",
}


@pytest.mark.parametrize("command", OF_THE_METHOD)
def test_help_lists_our_flags_and_trls(command: str, autofit: Autofit) -> None:
    ran = autofit(*command.split(), "--help")
    assert ran.code == 0
    said = set(ran.out.replace(",", " ").split())
    assert {"--gpu", "--simulate", "--forbid", "--learning_rate", "--lora_r", OF_THE_METHOD[command]} <= said


def test_help_of_a_method_that_is_not_installed_prints_no_half(
    autofit: Autofit, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(method: str) -> str:
        raise MissingExtraError(f"{method} is not installed.", hint="Install it.")

    monkeypatch.setattr(worker, "help_text", not_installed)
    ran = autofit("ppo", "--help")
    assert (ran.code, ran.out) == (3, "")


@pytest.mark.parametrize("argv", [(), ("--help",), ("plan", "--help"), ("explain", "--help"), ("--version",)])
def test_short_help_is_there_at_once(argv: tuple[str, ...], autofit: Autofit) -> None:
    ran = autofit(*argv)
    assert (ran.code, ran.err) == (0, "")
    assert "autofit" in ran.out


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    """``autofit gpus | head -1``: the pipe is closed before everything is written."""
    process = subprocess.Popen(
        [sys.executable, "-m", "autotrain_mem.cli.main", "gpus"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.wait(30)
    process.stderr.close()
