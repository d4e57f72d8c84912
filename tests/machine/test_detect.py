"""Devices, their processes and links as a fake pynvml reports them; errors for cards that torch cannot use."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_nvml import FakeGpu, FakeInstance, FakeNvml
from nouns import TRL_DEFAULTS

from autotrain_mem.drop_in.device import grow_segments
from autotrain_mem.machine import detect as module
from autotrain_mem.machine import nvml as nvml_module
from autotrain_mem.machine import usable
from autotrain_mem.machine.catalog import catalog, named
from autotrain_mem.machine.detect import HOST_NON_TORCH_BYTES, detect
from autotrain_mem.machine.links import detected_link, links, topology, usual_link
from autotrain_mem.machine.nvml import NOBODY, held_by, others_on
from autotrain_mem.machine.usable import GpuPackage, NoAnswer, check_usable, examine_package
from autotrain_mem.support.errors import UnreadableGpuError, UsageError
from autotrain_mem.support.host import HostMemory
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.training.environment import seen_cards
from autotrain_mem.training.process.build import real_device
from autotrain_mem.training.task import Request
from autotrain_mem.types import Job
from autotrain_mem.types.experience import OtherProcess

A = "GPU-aaaa1111-0000-0000-0000-000000000000"
B = "GPU-bbbb2222-0000-0000-0000-000000000000"
C = "GPU-bbbb3333-0000-0000-0000-000000000000"
X = "MIG-xxxx1111-0000-0000-0000-000000000000"
Y = "MIG-yyyy2222-0000-0000-0000-000000000000"
CARD = replace(named("rtx3090"), origin="detected", index=0, uuid=A)
STRANGER = 1 << 30
GB = 10**9


def split_a100(*instances: FakeInstance | None) -> FakeGpu:
    name = "NVIDIA A100-SXM4-40GB"
    return FakeGpu(C, name, total_mib=40960, capability=(8, 0), cores=6912, instances=list(instances))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Three equal cards, and neither of CUDA's variables set."""
    fake = FakeNvml([FakeGpu(A), FakeGpu(B), FakeGpu(C)])
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(nvml_module, "_started_in", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return fake


def indices() -> list[int | None]:
    return [device.index for device in detect()]


def test_cuda_visible_devices_hides_and_reorders_as_in_cuda(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert indices() == [0, 1, 2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2,0")
    assert indices() == [1, 2, 0]
    shown = {
        "1": [1],
        "2,0": [2, 0],
        "": [],
        "-1": [],
        "0,2,-1,1": [0, 2],
        "NoDevFiles": [],
        "1gpu,2": [1, 2],
        "1,1": [],
        "GPU-aaaa": [0],
        "GPU-bbbb3,GPU-aaaa1111": [2, 0],
        f"{B},{A}": [1, 0],
        "GPU-bbbb": [],
        "GPU-aaaa,GPU-ffff,GPU-bbbb2": [0],
        "1,GPU-aaaa": [1],
        "GPU-aaaa,GPU-aaaa1": [],
        "MIG-xxxx": [],
    }
    seen = {wanted: [device.index for device in detect({"CUDA_VISIBLE_DEVICES": wanted})] for wanted in shown}
    assert seen == shown, "the argument overrides this process's environment"


def test_different_cards_are_numbered_from_the_fastest_or_in_the_order_of_the_bus(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = FakeGpu(A, "Tesla T4", total_mib=15360, reserved_mib=448, capability=(7, 5), cores=2560, clock=1590)
    nvml.gpus = [slow, FakeGpu(B)]
    assert indices() == [1, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert indices() == [1]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        assert indices() == [0, 1]
    nvml.gpus[1].cores = None
    assert indices() == [0, 1]


def test_speeds_and_non_torch_bytes_are_the_catalogs_for_an_unknown_card_none_and_the_largest(nvml: FakeNvml) -> None:
    nvml.gpus = [FakeGpu(A, unlisted_bytes=5000 * MIB)]
    (device,), total_bytes = detect(), (24576 - 452) * MIB
    assert (device.name, device.origin, device.uuid) == ("NVIDIA GeForce RTX 3090", "detected", A)
    size = {"total_bytes": total_bytes, "free_bytes": total_bytes - 5000 * MIB}
    place = {name: getattr(device, name) for name in ("name", "origin", "index", "uuid", "source")}
    assert device == replace(named("rtx3090"), **size, **place)
    nvml.gpus = [FakeGpu(A, "NVIDIA Something New", capability=(99, 0), cores=None)]
    (device,) = detect()
    assert device.bandwidth_bytes_per_second is device.bf16_flops_per_second is None
    assert device.non_torch_bytes == max(card.non_torch_bytes for card in catalog())
    assert "outside torch: unknown" in device.source


def test_a_lost_card_is_an_error_only_if_it_is_selected(nvml: FakeNvml) -> None:
    nvml.gpus[0].lost = "GPU is lost"
    for wanted, shown, told in (
        (None, [1, 2], "cannot read GPU 0: GPU is lost. Another GPU is used"),
        ("1", [1], ""),
        (B, [1], ""),
        ("1,0,2", [1], ""),
        ("-1", [], ""),
        ("0", None, "cannot read GPU 0: GPU is lost"),
        ("GPU-aaaa", None, "cannot read GPU 0: GPU is lost"),
    ):
        environment, reasons = {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}, list[str]()
        if shown is not None:
            assert [device.index for device in detect(environment, reasons.append)] == shown
            assert [told in reason for reason in reasons] == [True] * bool(told), wanted
        else:
            with pytest.raises(UnreadableGpuError, match=told):
                detect(environment)
    nvml.gpus[1].lost = nvml.gpus[2].lost = "Insufficient Permissions"
    with pytest.raises(UnreadableGpuError, match="GPU 0: GPU is lost, GPU 1: Insufficient Permissions, GPU 2"):
        detect({"CUDA_VISIBLE_DEVICES": "0,1,2"})


@pytest.mark.parametrize("says_zero", [False, True])
@pytest.mark.parametrize(("is_integrated", "free_gib"), [(True, 100), (False, 5)])
def test_torch_measures_memory_that_nvml_does_not_report(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, *, is_integrated: bool, free_gib: int, says_zero: bool
) -> None:
    """``cudaMemGetInfo`` does not count pages of files, which fill the host's memory and can be taken back."""
    asked = []

    def child(package: str, environment: Mapping[str, str]) -> GpuPackage:
        asked.append((package, environment))
        return GpuPackage(total_bytes=119 * GIB, free_bytes=5 * GIB, is_integrated=is_integrated)

    memory = HostMemory(total_bytes=121 * GIB, available_bytes=100 * GIB, source="")
    monkeypatch.setattr(module, "examine_package", child)
    monkeypatch.setattr(module, "host_memory", lambda: memory)
    gb10 = FakeGpu(A, "NVIDIA GB10", total_mib=0, reserved_mib=0, capability=(12, 1), cores=6144)
    nvml.gpus, gb10.shares_memory = [gb10], not says_zero
    (device,) = detect({"SOME": "1"})
    assert device.total_bytes == 119 * GIB
    assert device.free_bytes == free_gib * GIB - (HOST_NON_TORCH_BYTES if is_integrated else 0)
    assert asked == [("torch", {"SOME": "1", "CUDA_VISIBLE_DEVICES": A})]
    assert module.as_now(device) is device


def test_a_card_of_unknown_memory_is_an_error_in_torchs_words(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.gpus[0].shares_memory = True
    answers = [NoAnswer("the process ended with status 3"), GpuPackage(problem="too old", fix="Update")]
    monkeypatch.setattr(module, "examine_package", Mock(side_effect=answers))
    for reason in ("ended with status 3", "too old"):
        with pytest.raises(UnreadableGpuError, match=reason) as refusal:
            detect()
    assert refusal.value.hint == "Update"


def test_a_processs_own_device_and_free_memory_are_read_although_another_card_is_lost(nvml: FakeNvml) -> None:
    nvml.gpus[2].unlisted_bytes = MIB
    third = module.cuda_device(2)
    assert third is not None
    assert (third.index, module.cuda_device(3)) == (2, None)
    nvml.gpus[0].lost, nvml.gpus[2].unlisted_bytes = "GPU is lost", 3 * MIB
    assert module.as_now(third).free_bytes == third.free_bytes - 2 * MIB
    nvml.gpus[2].lost = "GPU is lost"
    assert module.as_now(third) is third


def test_nvml_starts_once_a_process_and_again_after_an_error(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        assert (len(detect()), nvml_module.nvidia_driver()[0], others_on(CARD)) == (3, "580.65.06", ())
    assert (module.as_now(CARD).free_bytes, seen_cards((B,))["CUDA_VISIBLE_DEVICES"]) == (24124 * MIB, "1")
    assert (nvml.inits, nvml.shutdowns) == (1, 0)
    nvml.gpus[0].lost = "GPU is lost"
    assert module.as_now(CARD) is CARD
    nvml.gpus[0].lost = ""
    assert module.as_now(CARD).free_bytes == 24124 * MIB
    assert (nvml.inits, nvml.shutdowns) == (2, 1), "the card may have been reset"
    monkeypatch.setattr(nvml_module.os, "getpid", lambda: 1)  # as after a fork
    assert len(detect()) == 3
    assert (nvml.inits, nvml.shutdowns) == (3, 1)


def test_a_split_card_is_its_first_instance_or_the_one_of_a_uuid(nvml: FakeNvml) -> None:
    split = split_a100(None, FakeInstance(X, total_mib=4864, unlisted_bytes=GIB), FakeInstance(Y, total_mib=9856))
    nvml.gpus = [FakeGpu(A), split]  # an instance hides whole cards
    (device,) = detect()
    assert (device.index, device.uuid, device.total_bytes, device.free_bytes) == (1, X, 4864 * MIB, 3840 * MIB)
    assert device.name.endswith("MIG 1g.5gb")
    assert device.bandwidth_bytes_per_second is None
    nvml.gpus = [split_a100(None, None)]
    assert detect() == ()
    nvml.gpus = [split_a100(FakeInstance(X, total_mib=4864), FakeInstance(Y, total_mib=9856))]
    chosen = {Y: [Y], "MIG-yyyy": [Y], f"{Y},{X}": [Y], "MIG-zzzz": [], "0": [X], "GPU-bbbb3": [X]}
    assert {wanted: [device.uuid for device in detect({"CUDA_VISIBLE_DEVICES": wanted})] for wanted in chosen} == chosen


def test_cards_are_selected_by_numbers_in_the_order_of_the_bus_or_by_uuids_if_ambiguous(nvml: FakeNvml) -> None:
    nvml.gpus[2].clock *= 2  # the fastest, which CUDA would otherwise number 0
    nvml.gpus[2].name = "NVIDIA GeForce RTX 3090 Ti"
    for uuids in ((A,), (C,), (C, A), (B, C, A)):
        variables = seen_cards(uuids)
        numbers = variables["CUDA_VISIBLE_DEVICES"].split(",")
        assert [nvml.gpus[int(number)].uuid for number in numbers] == list(uuids)
        assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert [card.uuid for card in detect(variables)] == list(uuids)
    nvml.gpus[0].lost = "GPU is lost"  # CUDA may count without it
    assert seen_cards((B,)) == {"CUDA_VISIBLE_DEVICES": B}
    nvml.gpus = [FakeGpu(A), split_a100(FakeInstance(X, total_mib=7), FakeInstance(Y, total_mib=8))]
    assert seen_cards((X,)) == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert seen_cards((Y,)) == {"CUDA_VISIBLE_DEVICES": Y}  # not the first instance


def test_processes_are_named_once_largest_first(nvml: FakeNvml) -> None:
    gpu = nvml.gpus[0]
    gpu.computing = {STRANGER: GIB, os.getpid(): 2 * GIB}
    own, other = others_on(CARD)
    assert (own.pid, own.used_bytes) == (os.getpid(), 2 * GIB)
    assert own.name
    assert other == OtherProcess(pid=STRANGER, name="", used_bytes=GIB)
    gpu.computing, gpu.drawing = {STRANGER: GIB}, {STRANGER: GIB, STRANGER + 1: 100 * MIB}
    listed = [(other.pid, other.used_bytes) for other in others_on(CARD)]
    assert listed == [(STRANGER, GIB), (STRANGER + 1, 100 * MIB)]
    gpu.drawing = None
    assert [other.pid for other in others_on(CARD)] == [STRANGER]
    gpu.computing, gpu.drawing = {}, {}
    assert others_on(CARD) == (), "the driver's reserve is nobody's; memory of no listed process is, as in a container"
    gpu.computing, gpu.unlisted_bytes = {STRANGER: None}, 3 * GIB
    assert others_on(CARD)[0] == OtherProcess(pid=NOBODY, name="", used_bytes=3 * GIB)
    gpu.computing = {STRANGER: GIB, STRANGER + 1: None}
    assert [held_by(CARD, STRANGER + more) for more in range(3)] == [GIB, None, None]


def test_without_cards_a_driver_or_its_library_there_is_no_gpu_and_no_process_is_known(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.gpus[0].computing = {STRANGER: GIB}
    assert (others_on(named("rtx3090")), held_by(named("rtx3090"), STRANGER)) == ((), None)
    nvml.gpus[0].lost = "GPU is lost"
    assert (others_on(CARD), held_by(CARD, STRANGER)) == ((), None)
    for remove in (
        nvml.gpus.clear,
        lambda: setattr(nvml, "driver", None),
        lambda: monkeypatch.setitem(sys.modules, "pynvml", None),
    ):
        remove()
        monkeypatch.setattr(nvml_module, "_started_in", None)  # as a command that starts now
        assert (detect(), others_on(CARD), held_by(CARD, 1)) == ((), (), None)
        assert seen_cards((A,)) == {"CUDA_VISIBLE_DEVICES": A}


def test_every_card_of_the_catalog_has_a_usual_link_of_the_catalog() -> None:
    usual = {
        "h100-80gb": ("nvlink4", 350 * GB),
        "a100-80gb-pcie": ("pcie4", 20 * GB),
        "rtx3090": ("pcie4-host", 14 * GB),
        "rtx4060": ("pcie4-host", 7 * GB),
    }
    assert {name: usual_link(named(name)) for name in usual} == usual
    assert {usual_link(card)[0] for card in catalog()} <= links().keys()
    assert all(link.source for link in links().values())


def test_a_named_link_wins_and_the_rest_is_usual() -> None:
    card = named("h100-80gb")
    alone = topology(card, devices=1)
    assert (alone.link, alone.network, alone.links, alone.processes) == ("", "", None, 1)
    two = topology(card, devices=8, nodes=2)
    assert (two.processes, two.links) == (16, "nvlink4,ndr")
    slow = topology(card, devices=8, nodes=2, asked="ethernet100, pcie5")
    assert (slow.link, slow.link_bytes_per_second) == ("pcie5", 40 * GB)
    assert slow.network_bytes_per_second == 10 * GB // 8, "the GPUs of a machine share it"
    assert topology(named("rtx3090"), devices=2, nodes=2).network_bytes_per_second is None, "nothing is usual there"
    assert topology(named("24GiB"), devices=2).link_bytes_per_second is None
    assert topology(named("24GiB"), devices=2, asked="NVLink4").link_bytes_per_second == 350 * GB
    with pytest.raises(UsageError, match="two links between devices"):
        topology(card, devices=2, asked="nvlink4,pcie4")


def pair(**facts: object) -> list[FakeGpu]:
    return [FakeGpu("A", **facts), FakeGpu("B", **facts)]  # type: ignore[arg-type]


def test_the_slowest_detected_link_counts_and_without_nvml_the_usual_one(nvml: FakeNvml) -> None:
    for gpus, link, gb_per_second in (
        (pair(capability=(9, 0), bridged_to=("A", "B"), nvlinks=18), "nvlink4", 350),
        (pair(capability=(9, 0), bridged_to=("A", "B"), nvlinks=12), "nvlink4", 350 * 12 / 18),
        (pair(capability=(8, 0), bridged_to=("A", "B"), nvlinks=12), "nvlink3", 230),
        (pair(bridged_to=("A", "B"), nvlinks=4), "nvlink-bridge", 43),
        (pair(has_peers=False), "pcie4-host", 14),
        (pair(pcie_generation=5), "pcie5", 40),
        ([FakeGpu("A"), FakeGpu("B", pcie_lanes=8)], "pcie4", 10),
        ([*pair(bridged_to=("A", "B"), nvlinks=4), FakeGpu("C")], "pcie4", 20),
    ):
        nvml.gpus = gpus
        uuids = [gpu.uuid for gpu in gpus]
        found = topology(named("h100-80gb"), devices=len(gpus), uuids=uuids)
        assert (found.link, found.link_bytes_per_second) == (link, pytest.approx(gb_per_second * GB, abs=MIB)), gpus
        assert topology(named("h100-80gb"), devices=len(gpus), uuids=uuids, asked="pcie3").link == "pcie3", gpus
        nvml.gpus = []
        assert detected_link(uuids) is None, gpus
        assert topology(named("a100-80gb"), devices=2, uuids=uuids).link == "nvlink3", gpus


OLD = "The NVIDIA driver on your system is too old (found version 12020).\nPlease update your GPU driver"
KERNELS = "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be ..."
COMPILED = "Torch not compiled with CUDA enabled"


@pytest.fixture
def gpu(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A card that torch can use."""
    fake, nvml.driver = nvml.gpus[0], "535.104"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", A)
    for name in ("init", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: fake.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: fake.capability)
    for name in ("set_device", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda index: None)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda size, device: ones(size))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return fake


def refusal() -> tuple[str, str]:
    with pytest.raises(UnreadableGpuError) as refused:
        check_usable(0)
    return refused.value.message, refused.value.hint


def test_the_message_is_torchs_and_the_fix_follows_from_driver_and_build(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, driver_cuda, built_for, cures in (
        (RuntimeError(OLD), 12020, "13.0", ["driver 580 or newer, and 535.104 is installed", "whl/cu126"]),
        (RuntimeError(OLD), 11040, "12.6", ["driver 525 or newer", "there is none for this driver"]),
        (AssertionError(COMPILED), 12020, None, ["built without CUDA", "whl/cu126"]),
        (AssertionError(COMPILED), 13020, None, ["whl/cu130"]),
        (RuntimeError("unknown error"), 13000, "13.0", ["need a reboot", "wsl/lib", "CAPABILITIES=compute,utility"]),
    ):
        monkeypatch.setattr(sys.modules["pynvml"], "cuda", driver_cuda)
        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=error))
        message, hint = refusal()
        assert " ".join(str(error).split()) in message
        lacking = [cure for cure in (*cures, "--gpu NAME --plan_only", "--use_cpu") if cure not in hint]
        assert lacking == [], (error, driver_cuda)


def test_a_full_card_is_usable_and_one_without_kernels_is_not(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    check_usable(0)
    monkeypatch.setattr(torch, "ones", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    check_usable(0)
    monkeypatch.setattr(torch, "ones", Mock(side_effect=RuntimeError(KERNELS)))
    gpu.capability = (7, 0)
    message, hint = refusal()
    assert message.endswith("execution on the device")
    assert "pre-Turing" in hint
    assert "whl/cu126" in hint


def test_a_virtual_card_without_expandable_segments_is_explained(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "CUDA driver error: operation not supported"
    monkeypatch.setattr(torch, "ones", Mock(side_effect=RuntimeError(words)))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    message, hint = refusal()
    assert message.startswith("NVIDIA GeForce RTX 3090 refuses expandable segments")
    assert words in message
    assert "--forbid expandable_segments" in hint
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    assert refusal()[0] == f"torch cannot use NVIDIA GeForce RTX 3090: {words}"
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda text: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    grow_segments(torch.device("cpu"))  # a drop-in trainer's own process, on the CPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UnreadableGpuError, match="refuses expandable segments"):
        grow_segments(torch.device("cuda", 0))


@pytest.mark.parametrize(("processes", "local_rank", "opened"), [(4, "3", "cuda:3"), (1, "3", "cuda:0")])
def test_a_rank_opens_its_own_card_and_no_other(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, processes: int, local_rank: str, opened: str
) -> None:
    """Torch's rule: what names no index goes to the current device, and the first touch of a device opens a context."""
    current, contexts = [0], list[str]()

    def touch(device: Any) -> None:
        device = torch.device(device if isinstance(device, str) else f"cuda:{device}")
        contexts.append(f"cuda:{current[0] if device.index is None else device.index}")

    def set_device(index: int) -> None:
        current[0] = index
        touch(index)

    def allocate(size: int, *, device: Any) -> torch.Tensor:
        touch(device)
        return torch.zeros(size)

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch, "ones", allocate)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    job = Job(method="sft", model="m", dataset=None, arguments={})
    knobs = replace(TRL_DEFAULTS, processes=processes)
    request = Request(task="probe", job=job, knobs=knobs, hardware=CARD, simulate=False, output_dir=".")
    gpu.unlisted_bytes = GIB
    with real_device(request) as device:
        assert device.hardware == replace(CARD, free_bytes=23100 * MIB), "its own card's, before its context"
        assert set(contexts) == {opened}
        assert f"cuda:{current[0]}" == opened
    contexts.clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda text: None)
    grow_segments(torch.device("cuda", 2))  # a drop-in trainer under torchrun
    assert set(contexts) == {"cuda:2"}


def test_a_package_that_hangs_crashes_or_fails_on_import_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    for name, code, seconds, says in (
        ("hangs", "import time; time.sleep(600)", 1.0, "within 1 s"),
        ("crashes", "import os; os.kill(os.getpid(), 11)", 60.0, "status -11"),
        ("fails", "raise ValueError(3)", 60.0, "ValueError"),
    ):
        (tmp_path / f"package_that_{name}.py").write_text(code)
        with pytest.raises(NoAnswer, match=says):
            examine_package(f"package_that_{name}", {}, seconds)


def test_the_child_sends_torchs_facts_or_its_problem(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Mock(**{"receive.return_value": {"package": "torch"}})
    monkeypatch.setattr(usable, "Channel", lambda ignore_interrupt: channel)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2, 3))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Mock(is_integrated=1))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28))
    usable.main()
    monkeypatch.setattr(torch, "ones", Mock(side_effect=RuntimeError(KERNELS)))
    usable.main()
    told, refused = (GpuPackage(**call.args[0]) for call in channel.send.call_args_list)
    assert told == GpuPackage(cuda="13.0", nccl="2.28", total_bytes=3, free_bytes=2, is_integrated=True)
    assert refused.problem.startswith("torch cannot use NVIDIA GeForce RTX 3090")
    assert "a reboot" in refused.fix
