"""What the training process is given to see: one card or none, and how its allocator is set."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem.planning.card import settings_on
from autotrain_mem.support.errors import UsageError
from autotrain_mem.training.environment import one_tracked_run, process_environment
from autotrain_mem.types import Hardware
from autotrain_mem.types.hardware import Topology

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


def test_expandable_segments_reach_the_allocator_of_a_real_card_which_is_left_alone_unless_asked() -> None:
    assert _environment() == {"CUDA_VISIBLE_DEVICES": "GPU-1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert process_environment(CARD, TRL_DEFAULTS, {}, simulate=False) == {"CUDA_VISIBLE_DEVICES": "GPU-1"}


def test_an_amd_card_is_shown_by_what_hip_calls_it() -> None:
    topology = Topology(devices=2, uuids=("3@0000:c1:00.0", "2@0000:85:00.0"))
    card = replace(CARD, architecture="gfx942", uuid="3@0000:c1:00.0", topology=topology)
    shown = {"CUDA_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3"}
    assert process_environment(card, TRL_DEFAULTS, {}, simulate=False) == shown
    both = process_environment(card, replace(TRL_DEFAULTS, processes=2), {}, simulate=False)
    assert (both["CUDA_VISIBLE_DEVICES"], both["HIP_VISIBLE_DEVICES"]) == ("3,2", "3,2")


def test_on_an_amd_card_the_allocator_goes_without_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    amd = replace(CARD, architecture="gfx942")
    assert settings_on(CARD, {}).grows
    assert not settings_on(amd, {}).grows
    assert settings_on(amd, {}).max_split_bytes == 64 * 2**20
    with pytest.raises(UsageError, match="PYTORCH_HIP_ALLOC_CONF is not read by autofit") as refused:
        settings_on(amd, {"PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:64"})
    assert "PYTORCH_ALLOC_CONF" in str(refused.value.hint)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_shell_sets_for_the_allocator_stays_and_the_env_block_wins(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert _environment()[name] == "max_split_size_mb:64,expandable_segments:True"
    environment = _environment(given={name: "max_split_size_mb:32", "SOME": "1"})
    assert environment[name] == "max_split_size_mb:32,expandable_segments:True"
    assert environment["SOME"] == "1"


def test_without_a_card_none_is_seen_and_threads_sleep() -> None:
    for card in (CARD, CPU):
        environment = _environment(card, {"CUDA_VISIBLE_DEVICES": "0"}, simulate=card is CARD)
        assert (environment["CUDA_VISIBLE_DEVICES"], environment["OMP_WAIT_POLICY"]) == ("", "PASSIVE")
        assert environment["HIP_VISIBLE_DEVICES"] == "-1", "HIP takes an empty text for none"
        assert not {*NAMES} & environment.keys()


def test_only_where_the_cpu_is_the_device_freed_tensors_go_back_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _environment(CPU)["MALLOC_MMAP_THRESHOLD_"] == "1048576"
    assert "MALLOC_MMAP_THRESHOLD_" not in _environment(simulate=True) | _environment()
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4096")
    assert _environment(CPU)["MALLOC_MMAP_THRESHOLD_"] == "4096"
    assert _environment(CPU, {"MALLOC_MMAP_THRESHOLD_": "8192"})["MALLOC_MMAP_THRESHOLD_"] == "8192"


def test_all_processes_of_a_run_are_one_run_of_its_tracker_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert one_tracked_run("4711", {}) == {"WANDB_RUN_ID": "4711", "WANDB_RESUME": "allow"}
    assert one_tracked_run("4711", {"WANDB_RESUME": "never"}) == {}
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert one_tracked_run("4711", {}) == {}
