"""AMD's cards, by a stand-in for torch's word and one for amdsmi's; no test has ever met such a card."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_amdsmi import FakeAmdGpu, FakeAmdSmi
from fake_nvml import FakeGpu, FakeNvml

from autotrain_mem.machine import amd_cards, choose, detect, torch_child
from autotrain_mem.machine.catalog import named
from autotrain_mem.machine.measure import NOBODY, held_by, measured, others_on
from autotrain_mem.machine.overhead import AMD_BYTES
from autotrain_mem.machine.torch_child import (
    HipDevice,
    NoAnswer,
    Seen,
    XpuDevice,
    hip_devices,
    mps_bytes,
    seen,
    torch_build,
    xpu_devices,
)
from autotrain_mem.support.errors import NoGpuError, UnreadableGpuError
from autotrain_mem.support.store import Store
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types.hardware import Hardware

FIRST, SECOND = "0000:c1:00.0", "0000:85:00.0"


def device(address: str, name: str = "AMD Instinct MI300X", architecture: str = "gfx942") -> HipDevice:
    features = f"{architecture}:sramecc+:xnack-"
    total_bytes = named("mi300x").total_bytes
    return HipDevice(
        name=name, gcn_arch_name=features, total_bytes=total_bytes, free_bytes=total_bytes - GIB, address=address
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[HipDevice]:
    """What torch for ROCm sees: two cards, until a test changes the list."""
    found = [device(FIRST), device(SECOND)]

    def told(environment: Mapping[str, str] = {}) -> Seen:
        return Seen(hip=tuple(found))

    monkeypatch.setattr(amd_cards, "seen", told)
    monkeypatch.setattr(detect, "torch_build", lambda: "hip")
    monkeypatch.setattr(choose, "torch_build", lambda: "hip")
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([FakeGpu("GPU-1")]))  # type: ignore[arg-type]
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> FakeAmdSmi:
    """amdsmi, in another order than HIP."""
    fake = FakeAmdSmi([FakeAmdGpu(SECOND, used_mib=300), FakeAmdGpu(FIRST, used_mib=10_000)])
    monkeypatch.setitem(sys.modules, "amdsmi", fake)  # type: ignore[arg-type]
    return fake


def fake_torch(hip: str | None, **parts: object) -> SimpleNamespace:
    properties = SimpleNamespace(
        name="AMD Instinct MI300X",
        major=9,
        minor=4,
        gcnArchName="gfx942:sramecc+:xnack-",
        total_memory=191 * GIB,
        pci_domain_id=0,
        pci_bus_id=0xC1,
        pci_device_id=0,
    )
    cuda = SimpleNamespace(
        device_count=lambda: 1,
        get_device_properties=lambda index: properties,
        mem_get_info=lambda index: (190 * GIB, 191 * GIB),
    )
    return SimpleNamespace(version=SimpleNamespace(hip=hip), cuda=cuda, **parts)


def test_a_card_of_amd_is_told_by_its_architecture_and_never_by_the_capability_that_torch_makes_up() -> None:
    (told,) = hip_devices(fake_torch("6.4.43482"))
    assert (told["gcn_arch_name"], told["address"]) == ("gfx942:sramecc+:xnack-", FIRST)
    assert "major" not in told
    assert hip_devices(fake_torch(None)) == [], "a build for CUDA sees NVIDIA's"


def test_with_a_torch_for_rocm_the_cards_are_torchs_and_nvml_is_not_asked(here: list[HipDevice]) -> None:
    first, second = detect.detect()
    assert (first.name, first.index, first.uuid) == ("AMD Instinct MI300X", 0, f"0@{FIRST}")
    assert (second.index, second.uuid) == (1, f"1@{SECOND}")
    assert (first.compute_capability, first.architecture, first.capability) == (None, "gfx942", "gfx942")
    assert first.fp16_flops_per_second == named("mi300x").fp16_flops_per_second
    assert (first.free_bytes, first.non_torch_bytes) == (here[0].free_bytes, AMD_BYTES)
    assert first.source.startswith("memory: torch; speed: catalog, mi300x; outside torch: as an MI300X had")
    assert detect.cuda_device(1) == second
    assert detect.cuda_device(2) is None
    assert measured(first, Store(None)) is first, "NVML measures none"


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, ["0", "1"]),
        ({"HIP_VISIBLE_DEVICES": "3,2"}, ["3", "2"]),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, ["1", "0"]),
        ({"HIP_VISIBLE_DEVICES": "3,2", "CUDA_VISIBLE_DEVICES": "1,0"}, ["3", "2"]),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1,0"}, ["1", "0"]),
    ],
)
def test_a_process_is_bound_to_a_card_by_what_hip_calls_it(
    here: list[HipDevice], environment: dict[str, str], names: list[str]
) -> None:
    assert [str(card.uuid).partition("@")[0] for card in detect.detect(environment)] == names


def test_what_is_free_is_amdsmis_word_of_the_card_at_the_same_address(here: list[HipDevice], smi: FakeAmdSmi) -> None:
    first, second = detect.detect()
    assert first.free_bytes == first.total_bytes - 10_000 * MIB
    assert second.free_bytes == second.total_bytes - 300 * MIB
    assert "free by amdsmi" in first.source
    smi.gpus[1].used_mib = 20
    assert detect.free_bytes(first) == first.total_bytes - 20 * MIB
    assert smi.started == 0
    smi.starts = False
    assert detect.free_bytes(first) is None
    assert amd_cards.why_no_amdsmi() == "amdsmi does not start (the driver is not loaded)"


def test_others_on_the_card_are_named_and_what_the_driver_keeps_is_nobodys(
    here: list[HipDevice], smi: FakeAmdSmi
) -> None:
    first, second = detect.detect()
    smi.gpus[1].processes = [
        {"pid": 1 << 30, "name": "train", "mem": 1, "memory_usage": {"vram_mem": 9 * GIB}},
        {"pid": 7, "name": "old", "mem": 256 * MIB},
        {"pid": 8, "name": "N/A", "memory_usage": {"vram_mem": "N/A"}},
        object(),  # a handle of ROCm 5
    ]
    train, nobody, old, unknown = others_on(first)
    assert (train.pid, train.used_bytes) == (1 << 30, 9 * GIB)
    assert (old.pid, old.used_bytes) == (7, 256 * MIB)
    assert (unknown.pid, unknown.used_bytes) == (8, 0)
    assert (nobody.pid, nobody.used_bytes) == (NOBODY, 10_000 * MIB - 9 * GIB - 256 * MIB)
    assert (held_by(first, 7), held_by(first, 9)) == (256 * MIB, None)
    smi.gpus[0].processes = None
    assert others_on(second) == ()


def test_an_architecture_of_which_nothing_is_known_is_refused_or_passed_over(here: list[HipDevice]) -> None:
    here[0] = device(FIRST, "AMD Radeon RX 6800", "gfx1030")
    heard: list[str] = []
    (card,) = detect.detect({}, heard.append)
    assert (card.index, card.uuid) == (1, f"1@{SECOND}"), "it keeps its place"
    assert heard == ["Nothing is known of the architecture of AMD Radeon RX 6800 (gfx1030). Another GPU is taken."]
    here.pop()
    with pytest.raises(
        UnreadableGpuError, match=r"AMD Radeon RX 6800 \(gfx1030\): known are gfx90a, gfx942, gfx1100"
    ) as no:
        detect.detect()
    assert "--gpu NAME --plan_only" in str(no.value.hint)


def test_a_torch_that_does_not_answer_is_an_error_and_not_a_machine_without_cards(
    here: list[HipDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(environment: object) -> Seen:
        raise NoAnswer("RuntimeError: No HIP GPUs are available")

    monkeypatch.setattr(amd_cards, "seen", refuse)
    with pytest.raises(UnreadableGpuError, match="No HIP GPUs are available") as no:
        detect.detect()
    assert "render" in str(no.value.hint)


def test_no_card_of_amd_is_said_to_be_missing_where_torch_is_built_for_them(here: list[HipDevice]) -> None:
    here.clear()
    with pytest.raises(NoGpuError, match="No AMD GPU was found on this machine with HIP_VISIBLE_DEVICES='7'"):
        choose.choose(None, use_cpu=False, environment={"HIP_VISIBLE_DEVICES": "7"})


def test_a_plan_for_an_amd_card_says_that_none_was_ever_run(here: list[HipDevice]) -> None:
    heard: list[str] = []
    card = choose.choose("w7900", use_cpu=False, warn=heard.append)
    assert (card.architecture, len(heard)) == ("gfx1100", 1)
    assert choose.choose(None, use_cpu=False, gpus=1, store=Store(None), warn=heard.append).architecture == "gfx942"
    assert all("published facts: no plan was ever run on an AMD card" in each for each in heard)
    choose.choose("a100-80gb", use_cpu=False, warn=heard.append)
    assert len(heard) == 2


def test_the_variable_that_leaves_a_card_out_is_hips(here: list[HipDevice]) -> None:
    here[1] = device(SECOND, "AMD Instinct MI325X")
    heard: list[str] = []
    choose.choose(None, use_cpu=False, store=Store(None), warn=heard.append)
    assert any("HIP_VISIBLE_DEVICES=1 leaves it out" in each for each in heard)


# -- Apple's and Intel's -----------------------------------------------------------------------------------------------


def test_what_apple_and_intel_have_is_seen() -> None:
    apple = SimpleNamespace(
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: True)),
        mps=SimpleNamespace(recommended_max_memory=lambda: 24 * GIB),
    )
    assert mps_bytes(apple) == 24 * GIB
    arc = SimpleNamespace(name="Intel(R) Arc(TM) B580 Graphics", total_memory=12 * GIB)
    xpu = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda index: arc)
    (told,) = xpu_devices(SimpleNamespace(xpu=xpu))
    assert told == {"name": arc.name, "total_bytes": 12 * GIB}
    none = SimpleNamespace(is_available=lambda: False)
    assert mps_bytes(SimpleNamespace(backends=SimpleNamespace(mps=none))) is None
    assert xpu_devices(SimpleNamespace(xpu=none)) == []


UNPLANNED = [
    (Seen(mps_bytes=24 * GIB), "Apple's GPU (MPS), 24.0 GiB of unified memory for it"),
    (
        Seen(xpu=(XpuDevice(name="Intel Arc B580", total_bytes=12 * GIB),)),
        "Intel Arc B580 (Intel XPU), 12.0 GiB",
    ),
]


@pytest.mark.parametrize(("told", "named_as"), UNPLANNED, ids=["mps", "xpu"])
def test_a_gpu_that_is_not_planned_for_is_named_with_the_ways_on_and_nothing_falls_to_the_cpu(
    told: Seen, named_as: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "detect", lambda *args: ())
    monkeypatch.setattr(torch_child, "seen", lambda: told)
    for ask in (lambda: choose.choose(None, use_cpu=False), lambda: choose.check_device(None)):
        with pytest.raises(NoGpuError) as no:
            ask()
        assert no.value.message.startswith(
            f"This machine has {named_as}, which autofit does not plan for: its allocator"
        )
        for way in ("--gpu NAME --plan_only", "--gpu NAME --simulate", "--use_cpu"):
            assert way in str(no.value.hint)
    assert choose.choose("rtx3060", use_cpu=False).name == "rtx3060"


# -- what is asked, and when -------------------------------------------------------------------------------------------

VERSION = "__all__ = ['hip', 'xpu']\nhip: Optional[str] = {hip}\nxpu: Optional[str] = {xpu}\n"


@pytest.mark.parametrize(
    ("hip", "xpu", "build"),
    [("None", "None", ""), ("'6.4.43482'", "None", "hip"), ("None", "'20250101'", "xpu")],
)
def test_what_torch_is_built_for_is_read_and_not_imported(
    hip: str, xpu: str, build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(VERSION.format(hip=hip, xpu=xpu), encoding="utf-8")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(torch_child.importlib.util, "find_spec", lambda name: spec)
    assert torch_build() == build
    monkeypatch.setattr(torch_child.importlib.util, "find_spec", lambda name: None)
    assert torch_build() == "", "no torch at all"


def test_a_build_for_the_cpu_is_not_asked_and_another_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_child, "torch_build", lambda: "")
    monkeypatch.setattr(torch_child.sys, "platform", "linux")
    assert seen() == Seen()
    monkeypatch.setattr(torch_child, "torch_build", lambda: "xpu")
    monkeypatch.setattr(torch_child, "LISTING_MODULE", "no_such_module")
    with pytest.raises(NoAnswer):
        seen({"ZE_AFFINITY_MASK": "1"})


def test_the_process_that_is_asked_tells_what_the_installed_torch_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_child, "torch_build", lambda: "xpu")
    told = seen({"ZE_AFFINITY_MASK": "0"})
    assert (told.hip, told.unplanned) == ((), Seen(mps_bytes=told.mps_bytes, xpu=told.xpu).unplanned)


def test_hardware_of_amd_is_read_back_as_it_was_written() -> None:
    from autotrain_mem.support import codec

    for card in (named("mi300x"), named("t4")):
        written = codec.to_json(card)
        assert codec.from_json(Hardware, written) == card
        assert ("architecture" in written) is (card.name == "mi300x")
