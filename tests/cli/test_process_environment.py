"""What the training process is given to see: one card or none, and how its allocator is set."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem.training.environment import one_tracked_run, process_environment
from autotrain_mem.types import Hardware

CARD = Hardware(
    name="a card", origin="detected", total_bytes=2**34, free_bytes=2**34, non_torch_bytes=2**28, uuid="GPU-1"
)
CPU = replace(CARD, name="cpu", origin="cpu", uuid=None)
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def _environment(card: Hardware = CARD, given: Mapping[str, str] | None = None, *, simulate: bool = False) -> Any:
    knobs = replace(TRL_DEFAULTS, expandable_segments=True)
    return process_environment(card, knobs, given or {}, simulate=simulate)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "MALLOC_MMAP_THRESHOLD_", "OMP_WAIT_POLICY", "WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", NAMES)
def test_expandable_segments_reach_a_real_card_if_asked_for_beside_the_shells_settings_and_the_env_block_wins(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _environment() == {"CUDA_VISIBLE_DEVICES": "GPU-1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert process_environment(CARD, TRL_DEFAULTS, {}, simulate=False) == {"CUDA_VISIBLE_DEVICES": "GPU-1"}
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert _environment()[name] == "max_split_size_mb:64,expandable_segments:True"
    environment = _environment(given={name: "max_split_size_mb:32", "SOME": "1"})
    assert environment[name] == "max_split_size_mb:32,expandable_segments:True"
    assert environment["SOME"] == "1"


def test_without_a_card_none_is_seen_threads_sleep_and_on_the_cpu_freed_tensors_go_back_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for card in (CARD, CPU):
        environment = _environment(card, {"CUDA_VISIBLE_DEVICES": "0"}, simulate=card is CARD)
        assert (environment["CUDA_VISIBLE_DEVICES"], environment["OMP_WAIT_POLICY"]) == ("", "PASSIVE")
        assert environment["HIP_VISIBLE_DEVICES"] == "-1", "HIP takes an empty text for none"
        assert not {*NAMES} & environment.keys()
    assert _environment(CPU)["MALLOC_MMAP_THRESHOLD_"] == "1048576"
    assert "MALLOC_MMAP_THRESHOLD_" not in _environment(simulate=True) | _environment()
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4096")
    assert _environment(CPU)["MALLOC_MMAP_THRESHOLD_"] == "4096"
    assert _environment(CPU, {"MALLOC_MMAP_THRESHOLD_": "8192"})["MALLOC_MMAP_THRESHOLD_"] == "8192"


def test_all_processes_are_one_run_of_the_tracker_unless_users_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one_tracked_run("4711", {}) == {"WANDB_RUN_ID": "4711", "WANDB_RESUME": "allow"}
    assert one_tracked_run("4711", {"WANDB_RESUME": "never"}) == {}
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert one_tracked_run("4711", {}) == {}
