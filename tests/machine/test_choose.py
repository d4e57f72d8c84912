"""Which device a run is planned for."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from autotrain_mem.errors import NoGpuError, UnknownGpuError
from autotrain_mem.machine import choose as module
from autotrain_mem.machine.catalog import catalog, named
from autotrain_mem.machine.choose import choose, several
from autotrain_mem.spec.hardware import Hardware
from autotrain_mem.store import Store
from autotrain_mem.units import GIB


def found(name: str, index: int) -> Hardware:
    size_bytes = 24 * GIB
    return Hardware(
        name=name,
        origin="detected",
        total_bytes=size_bytes,
        free_bytes=size_bytes,
        non_torch_bytes=1,
        index=index,
        uuid=f"GPU-{index}",
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Hardware]:
    """The GPUs that detection finds: two, until a test changes the list."""
    gpus = [found("first", 1), found("second", 0)]

    def seen(environment: Mapping[str, str], *on_unreadable: object) -> tuple[Hardware, ...]:
        return tuple(gpus[:: -1 if environment else 1])

    def measured(card: Hardware, store: Store, environment: Mapping[str, str]) -> Hardware:
        return replace(card, source=f"measured{environment.get('CUDA_VISIBLE_DEVICES', '')}")

    monkeypatch.setattr(module, "detect", seen)
    monkeypatch.setattr(module, "measured", measured)
    return gpus


def test_the_first_gpu_that_cuda_shows_is_measured_unless_another_card_a_size_or_the_cpu_is_chosen(
    machine: list[Hardware],
) -> None:
    assert choose(None, use_cpu=False) == replace(machine[0], source="measured")
    assert choose("RTX 3060", use_cpu=False) == named("rtx3060")
    assert choose("300MiB", use_cpu=False).origin == "imagined"
    assert choose(None, use_cpu=True).origin == "cpu"
    with pytest.raises(UnknownGpuError):
        choose("rtx4099", use_cpu=False)
    assert {*several("all")} < {*catalog()}
    assert not [card.name for card in several("all") if "laptop" in card.name or "max-q" in card.name]
    assert several("rtx3060,rtx4090") == (named("rtx3060"), named("rtx4090"))
    assert several("rtx3060") == ()


def test_the_jobs_environment_says_which_card_is_planned_for_measured_and_trained_on(machine: list[Hardware]) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "1"}
    chosen = choose(None, use_cpu=False, environment=environment)
    assert chosen == replace(machine[1], source="measured1")
    assert module.training_device(chosen, simulate=False) is chosen
    assert module.training_device(named("rtx3060"), simulate=False, environment=environment) == machine[1]
    assert module.training_device(named("rtx3060"), simulate=False) == machine[0]


@pytest.mark.parametrize(("has_driver", "cure"), [(True, "NVIDIA_DRIVER_CAPABILITIES=compute,utility"), (False, "")])
def test_without_nvml_its_reason_is_told_and_where_the_driver_is_how_a_container_gets_it(
    machine: list[Hardware], monkeypatch: pytest.MonkeyPatch, *, has_driver: bool, cure: str
) -> None:
    machine.clear()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(module, "why_no_nvml", lambda: "NVML does not start (NVML Shared Library Not Found)")
    monkeypatch.setattr(module, "_DRIVER_FILES", ("/",) if has_driver else ())
    with pytest.raises(NoGpuError, match="machine: NVML does not start \\(NVML Shared Library Not Found\\)") as refusal:
        choose(None, use_cpu=False)
    assert cure in refusal.value.hint
    assert ("libnvidia-ml" in refusal.value.hint) == has_driver


@pytest.mark.parametrize("hidden", [None, "-1"])
def test_without_a_gpu_there_are_three_ways_on_and_the_variable_that_may_hide_it_is_named(
    machine: list[Hardware], monkeypatch: pytest.MonkeyPatch, hidden: str | None
) -> None:
    machine.clear()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.raises(NoGpuError) as refusal:
        choose(None, use_cpu=False)
    ways = [line.split("  ")[0] for line in refusal.value.hint.splitlines()]
    assert ways == ["--gpu NAME --plan_only", "--gpu NAME --simulate", "--use_cpu"]
    assert ("CUDA_VISIBLE_DEVICES='-1'" in refusal.value.message) == (hidden is not None)
