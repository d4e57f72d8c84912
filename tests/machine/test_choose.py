"""Tests the choice of the device that a run is planned for."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotrain_mem.machine import choose as module
from autotrain_mem.machine.catalog import catalog, named
from autotrain_mem.machine.choose import choose, several, unplanned_gpus
from autotrain_mem.machine.detect import VISIBLE
from autotrain_mem.support.errors import NoGpuError, UnknownGpuError, UsageError
from autotrain_mem.support.units import GIB
from autotrain_mem.types.hardware import Hardware, Topology


def found(name: str, index: int) -> Hardware:
    facts = {"total_bytes": 24 * GIB, "free_bytes": 24 * GIB, "non_torch_bytes": 1}
    return Hardware(name=name, origin="detected", index=index, uuid=f"GPU-{index}", **facts)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Hardware]:
    """The GPUs that detection finds: two, until a test changes the list."""
    gpus = [found("first", 1), found("second", 0)]

    def seen(environment: Mapping[str, str], *on_unreadable: object) -> tuple[Hardware, ...]:
        return tuple(gpus[:: -1 if environment else 1])

    monkeypatch.setattr(module, "detect", seen)
    monkeypatch.delenv(VISIBLE, raising=False)
    return gpus


def test_more_gpus_than_vllms_server_leaves_are_refused_and_it_takes_none_of_named(machine: list[Hardware]) -> None:
    cases: list[tuple[dict[str, Any], str, list[str]]] = [
        ({"gpus": 3}, "--gpus 3 is more than this machine has: 2 GPUs.", ["--gpus 2", "--plan_only"]),
        ({"gpus": 3, "environment": {VISIBLE: "0,1"}}, f"{VISIBLE}=0,1 shows: 2 GPUs.", ["--gpus 2", "--plan_only"]),
        ({"spared": 2}, "2 GPUs, and vLLM's server takes 2 of them.", ["--plan_only", "--vllm_mode colocate"]),
        ({"gpus": 2, "spared": 1}, "takes 1 of them.", ["--gpus 1", "--plan_only", "--vllm_mode colocate"]),
    ]
    for asked, message, ways in cases:
        with pytest.raises(NoGpuError, match=re.escape(message)) as refusal:
            choose(None, use_cpu=False, **asked)
        lines = refusal.value.hint.splitlines()
        assert [way in line for way, line in zip(ways, lines, strict=True)] == [True] * len(ways)
    assert choose(None, use_cpu=False, spared=1).topology == Topology(uuids=("GPU-1",))
    assert choose("rtx3060", use_cpu=False, gpus=4, spared=1).topology.devices == 4
    assert choose(None, use_cpu=False, spared=1, environment={VISIBLE: "0,1"}).topology.devices == 2


def test_all_visible_gpus_are_used_unless_a_card_a_size_or_the_cpu_is_chosen(machine: list[Hardware]) -> None:
    together = Topology(devices=2, uuids=("GPU-1", "GPU-0"))
    assert choose(None, use_cpu=False) == replace(machine[0], topology=together)
    alone = Topology(uuids=("GPU-1",))
    assert choose(None, use_cpu=False, gpus=1) == replace(machine[0], topology=alone)
    assert choose("RTX 3060", use_cpu=False) == named("rtx3060")
    assert choose("300MiB", use_cpu=False).origin == "imagined"
    assert choose(None, use_cpu=True).origin == "cpu"
    with pytest.raises(UnknownGpuError):
        choose("rtx4099", use_cpu=False)
    assert {*several("all")} < {*catalog()}
    assert not [card.name for card in several("all") if "laptop" in card.name or "max-q" in card.name]
    assert several("rtx3060,rtx4090") == (named("rtx3060"), named("rtx4090"))
    assert several("rtx3060") == several("rtx3060", (4,)) == several("") == ()
    counted = several("rtx3060,l4", (1, 4), nodes=2)
    assert [(card.name, card.topology.processes) for card in counted] == [
        *(("rtx3060", 2), ("rtx3060", 8)),
        *(("l4", 2), ("l4", 8)),
    ]
    with pytest.raises(UsageError, match="needs the name of a card"):
        several("", (1, 2))
    assert choose("rtx3060", use_cpu=False, gpus=4, nodes=2).topology.processes == 8
    with pytest.raises(UsageError, match="nvlink9"):
        choose("rtx3060", use_cpu=False, link="nvlink9")


def test_the_smallest_budget_and_speed_of_different_gpus_count_with_a_warning(machine: list[Hardware]) -> None:
    notes: list[str] = []
    machine[0] = replace(machine[0], compute_capability=(9, 0), fp16_flops_per_second=9)
    machine[1] = replace(machine[1], free_bytes=8 * GIB, compute_capability=(8, 6), fp16_flops_per_second=10)
    chosen = choose(None, use_cpu=False, warn=notes.append)
    assert (chosen.name, chosen.free_bytes, chosen.uuid) == ("second", 8 * GIB, "GPU-0")
    assert (chosen.compute_capability, chosen.fp16_flops_per_second) == ((8, 6), 9)
    assert chosen.bandwidth_bytes_per_second is None
    (note,) = notes
    assert note.startswith("The GPUs differ: all are planned like second (GPU 0), which has 8.00 GiB free")
    assert "CUDA_VISIBLE_DEVICES=1 " in note
    machine[1] = replace(machine[1], name="first")
    choose(None, use_cpu=False, warn=notes.append)
    assert notes[1].startswith("The GPUs differ: all are planned like first (GPU 0)")
    machine[1] = replace(machine[0], index=0, uuid="GPU-0")
    choose(None, use_cpu=False, warn=notes.append)
    assert len(notes) == 2, "equal GPUs need no warning"


def test_the_jobs_environment_selects_the_card_and_a_plan_for_several_trains_on_as_many_of_that_size(
    machine: list[Hardware],
) -> None:
    environment = {VISIBLE: "1"}
    chosen = choose(None, use_cpu=False, environment=environment)
    both = Topology(devices=2, uuids=("GPU-0", "GPU-1"))
    assert chosen == replace(machine[1], topology=both)
    assert module.training_device(chosen, simulate=False) is chosen
    one = module.training_device(named("rtx3060"), simulate=False, environment=environment)
    assert one == replace(machine[1], topology=Topology(uuids=("GPU-0",)))
    first = module.training_device(named("rtx3060"), simulate=False)
    assert first == replace(machine[0], topology=Topology(uuids=("GPU-1",)))
    two, three = (choose("rtx3060", use_cpu=False, gpus=count) for count in (2, 3))
    assert module.training_device(two, simulate=False).topology.uuids == ("GPU-1", "GPU-0")
    with pytest.raises(NoGpuError, match="3 x rtx3060; this machine has 2 GPUs of that size"):
        module.training_device(three, simulate=False)
    assert module.training_device(three, simulate=True) is three


@pytest.mark.parametrize(("hidden", "has_driver"), [(None, False), (None, True), ("-1", False)])
def test_without_a_gpu_the_error_names_three_alternatives_and_what_hides_the_gpu(
    machine: list[Hardware], monkeypatch: pytest.MonkeyPatch, hidden: str | None, *, has_driver: bool
) -> None:
    machine.clear()
    if hidden is not None:
        monkeypatch.setenv(VISIBLE, hidden)
    error = "NVML does not start (NVML Shared Library Not Found)"
    monkeypatch.setattr(module, "nvidia_driver", lambda: ("", None, error))
    monkeypatch.setattr(module, "_DRIVER_FILES", ("/",) if has_driver else ())
    with pytest.raises(NoGpuError) as refusal:
        choose(None, use_cpu=False)
    ways = [line.split("  ")[0] for line in refusal.value.hint.splitlines()]
    assert ways[-3:] == ["--gpu NAME --plan_only", "--gpu NAME --simulate", "--use_cpu"]
    assert ("libnvidia-ml" in refusal.value.hint) == has_driver
    reason = f" with {VISIBLE}={hidden!r}" if hidden else f": {error}"
    assert refusal.value.message.endswith(f"on this machine{reason}.")


VERSION = "__all__ = ['hip', 'xpu']\nhip: Optional[str] = {hip}\nxpu: Optional[str] = {xpu}\n"


@pytest.mark.parametrize(
    ("platform", "hip", "xpu", "named_as"),
    [
        ("linux", "None", "None", ""),
        ("linux", "'6.4.43482'", "None", "AMD's GPUs (ROCm)"),
        ("linux", "None", "'20250101'", "Intel's GPUs (XPU)"),
        ("darwin", "None", "None", "Apple's GPUs (MPS)"),
    ],
)
def test_builds_of_torch_for_other_gpus_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, hip: str, xpu: str, named_as: str
) -> None:
    (tmp_path / "version.py").write_text(VERSION.format(hip=hip, xpu=xpu), encoding="utf-8")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    monkeypatch.setattr("sys.platform", platform)
    assert unplanned_gpus() == named_as
    if named_as:
        with pytest.raises(NoGpuError, match=re.escape(f"torch is built for {named_as} here")) as refused:
            choose(None, use_cpu=False)
        assert "--gpu NAME --plan_only" in refused.value.hint
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert platform == "darwin" or unplanned_gpus() == "", "no torch at all"
