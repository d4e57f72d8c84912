"""Which device a run is planned for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotrain_mem.errors import NoGpuError, UnknownGpuError
from autotrain_mem.machine import choose as module
from autotrain_mem.machine.catalog import named
from autotrain_mem.machine.choose import choose
from autotrain_mem.spec.hardware import Hardware
from autotrain_mem.units import GIB


def found(name: str, index: int) -> Hardware:
    size_bytes = 24 * GIB
    return Hardware(
        name=name, origin="detected", total_bytes=size_bytes, free_bytes=size_bytes, non_torch_bytes=1, index=index
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Hardware]:
    """The GPUs that detection finds: two, until a test changes the list."""
    gpus = [found("first", 1), found("second", 0)]
    monkeypatch.setattr(module, "detect", lambda: tuple(gpus))
    monkeypatch.setattr(module, "measured", lambda card, store: replace(card, source="measured"))
    return gpus


def test_the_first_gpu_that_cuda_shows_is_chosen(machine: list[Hardware]) -> None:
    assert choose(None, use_cpu=False).name == machine[0].name


def test_only_a_gpu_that_is_here_is_measured(machine: list[Hardware]) -> None:
    assert choose(None, use_cpu=False).source == "measured"
    others = [choose("rtx3060", use_cpu=False), choose("6GiB", use_cpu=False), choose(None, use_cpu=True)]
    assert "measured" not in [other.source for other in others]


def test_a_named_card_is_chosen_over_the_one_that_is_here(machine: list[Hardware]) -> None:
    assert choose("RTX 3060", use_cpu=False) == named("rtx3060")


def test_a_size_is_an_imagined_card(machine: list[Hardware]) -> None:
    assert choose("300MiB", use_cpu=False).origin == "imagined"


def test_the_cpu_is_chosen_over_any_gpu(machine: list[Hardware]) -> None:
    assert choose(None, use_cpu=True).origin == "cpu"


def test_an_unknown_name_is_not_replaced_by_the_card_that_is_here(machine: list[Hardware]) -> None:
    with pytest.raises(UnknownGpuError):
        choose("rtx4099", use_cpu=False)


def test_without_a_gpu_there_are_three_ways_on_each_with_what_it_does(machine: list[Hardware]) -> None:
    machine.clear()
    with pytest.raises(NoGpuError) as refusal:
        choose(None, use_cpu=False)
    ways = [line.split("  ")[0] for line in refusal.value.hint.splitlines()]
    assert ways == ["--gpu NAME --plan_only", "--gpu NAME --simulate", "--use_cpu"]
    assert all(line.split("  ", 1)[1].strip() for line in refusal.value.hint.splitlines())


def test_the_variable_that_may_hide_every_gpu_is_named(
    machine: list[Hardware], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(NoGpuError, match="CUDA_VISIBLE_DEVICES='-1'"):
        choose(None, use_cpu=False)


def test_the_variable_is_not_blamed_when_it_is_not_set(
    machine: list[Hardware], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.clear()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(NoGpuError) as refusal:
        choose(None, use_cpu=False)
    assert "CUDA_VISIBLE_DEVICES" not in refusal.value.message
