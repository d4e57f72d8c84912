"""Detection through NVML, against a small stand-in for the pynvml module."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from autotrain_mem.errors import UnreadableGpuError
from autotrain_mem.machine.catalog import catalog, named
from autotrain_mem.machine.detect import HOST_NON_TORCH_BYTES, detect, host
from autotrain_mem.machine.overhead import overhead
from autotrain_mem.units import MIB


class FakeNvmlError(Exception):
    """What NVML raises for a question that it does not answer."""


@dataclass(eq=False)
class FakeInstance:
    """One MIG instance."""

    uuid: str
    total_mib: int
    used_mib: int = 0
    multiprocessors: int = 14
    gpu_instance: int = 7
    compute_instance: int = 0


@dataclass(eq=False)
class FakeGpu:
    """One card. ``reserved_mib`` is the driver's part, ``used_mib`` what running processes hold."""

    name: str
    uuid: str
    total_mib: int = 24576
    reserved_mib: int = 452
    used_mib: int = 0
    capability: tuple[int, int] = (8, 6)
    cores: int | None = 10496
    clock: int = 2100
    instances: list[FakeInstance | None] | None = None
    """None: not split. A None inside is an empty place."""


@dataclass
class FakeNvml:
    """The part of pynvml that detection uses."""

    gpus: list[FakeGpu] = field(default_factory=list)
    has_driver: bool = True
    has_second_memory_query: bool = True
    started: int = 0

    NVMLError = FakeNvmlError
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_CLOCK_SM = 1
    nvmlMemory_v2 = 2

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise FakeNvmlError("Driver Not Loaded")
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.started -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetName(self, handle: FakeGpu | FakeInstance) -> str:
        return handle.name if isinstance(handle, FakeGpu) else "NVIDIA A100-SXM4-40GB MIG 1g.5gb"

    def nvmlDeviceGetUUID(self, handle: FakeGpu | FakeInstance) -> str:
        return handle.uuid

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> SimpleNamespace:
        if version is not None and not self.has_second_memory_query:
            raise FakeNvmlError("Function Not Found")
        reserved_mib = getattr(handle, "reserved_mib", 0)
        free_mib = handle.total_mib - reserved_mib - handle.used_mib
        return SimpleNamespace(total=handle.total_mib * MIB, reserved=reserved_mib * MIB, free=free_mib * MIB)

    def nvmlDeviceGetCudaComputeCapability(self, handle: FakeGpu) -> tuple[int, int]:
        return handle.capability

    def nvmlDeviceGetNumGpuCores(self, handle: FakeGpu) -> int:
        if handle.cores is None:
            raise FakeNvmlError("Not Supported")
        return handle.cores

    def nvmlDeviceGetMaxClockInfo(self, handle: FakeGpu, clock: int) -> int:
        assert clock == self.NVML_CLOCK_SM
        return handle.clock

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:
        if handle.capability < (8, 0):
            raise FakeNvmlError("Not Supported")
        return [int(handle.instances is not None), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        return len(handle.instances or [])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, place: int) -> FakeInstance:
        instance = (handle.instances or [])[place]
        if instance is None:
            raise FakeNvmlError("Not Found")
        return instance

    def nvmlDeviceGetGpuInstanceId(self, handle: FakeInstance) -> int:
        return handle.gpu_instance

    def nvmlDeviceGetComputeInstanceId(self, handle: FakeInstance) -> int:
        return handle.compute_instance

    def nvmlDeviceGetAttributes_v2(self, handle: FakeInstance) -> SimpleNamespace:
        return SimpleNamespace(multiprocessorCount=handle.multiprocessors)


A = "GPU-aaaa1111-0000-0000-0000-000000000000"
B = "GPU-bbbb2222-0000-0000-0000-000000000000"
C = "GPU-bbbb3333-0000-0000-0000-000000000000"
X = "MIG-xxxx1111-0000-0000-0000-000000000000"
Y = "MIG-yyyy2222-0000-0000-0000-000000000000"


def rtx3090(uuid: str, used_mib: int = 0) -> FakeGpu:
    return FakeGpu(name="NVIDIA GeForce RTX 3090", uuid=uuid, used_mib=used_mib)


def split_a100(*instances: FakeInstance | None) -> FakeGpu:
    return FakeGpu(
        name="NVIDIA A100-SXM4-40GB", uuid=C, total_mib=40960, capability=(8, 0), cores=6912, instances=list(instances)
    )


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Three equal cards, and neither of CUDA's variables set."""
    fake = FakeNvml([rtx3090(A), rtx3090(B), rtx3090(C)])
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return fake


def indices() -> list[int | None]:
    return [device.index for device in detect()]


def test_every_card_is_found_in_nvml_order_when_nothing_is_hidden(nvml: FakeNvml) -> None:
    nvml.gpus.pop()
    assert indices() == [0, 1]
    assert {device.origin for device in detect()} == {"detected"}


def test_no_nvml_library_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert detect() == ()


def test_no_driver_means_no_gpu(nvml: FakeNvml) -> None:
    nvml.has_driver = False
    assert detect() == ()


def test_a_driver_without_cards_means_no_gpu(nvml: FakeNvml) -> None:
    nvml.gpus.clear()
    assert detect() == ()


def test_nvml_is_closed_again(nvml: FakeNvml) -> None:
    detect()
    assert nvml.started == 0


@pytest.mark.parametrize(
    ("wanted", "shown"),
    [
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 2 , 0 ", [2, 0]),
        ("", []),
        ("-1", []),
        ("0,2,-1,1", [0, 2]),
        ("0,7,1", [0]),
        ("NoDevFiles", []),
        ("1gpu,2", [1, 2]),
        ("1,1", []),
        ("GPU-aaaa", [0]),
        ("GPU-bbbb3,GPU-aaaa1111", [2, 0]),
        (f"{B},{A}", [1, 0]),
        ("GPU-bbbb", []),
        ("GPU-aaaa,GPU-ffff,GPU-bbbb2", [0]),
        ("GPU-aaaa,1", [0]),
        ("1,GPU-aaaa", [1]),
        ("GPU-aaaa,GPU-aaaa1", []),
        ("MIG-xxxx", []),
    ],
)
def test_cuda_visible_devices_hides_and_reorders_as_in_cuda(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, wanted: str, shown: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    assert indices() == shown


def slow_then_fast() -> list[FakeGpu]:
    slow = FakeGpu("Tesla T4", A, total_mib=15360, reserved_mib=448, capability=(7, 5), cores=2560, clock=1590)
    return [slow, rtx3090(B)]


def test_unlike_cards_are_counted_from_the_fastest(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.gpus = slow_then_fast()
    assert indices() == [1, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert indices() == [1]


def test_unlike_cards_keep_the_bus_order_where_it_is_asked_for(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.gpus = slow_then_fast()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert indices() == [0, 1]


def test_cards_that_do_not_tell_their_speed_keep_the_bus_order(nvml: FakeNvml) -> None:
    nvml.gpus = slow_then_fast()
    nvml.gpus[1].cores = None
    assert indices() == [0, 1]


def test_memory_is_what_torch_counts_and_what_others_hold_is_not_free(nvml: FakeNvml) -> None:
    nvml.gpus = [rtx3090(A, used_mib=5000)]
    (device,) = detect()
    assert device.total_bytes == (24576 - 452) * MIB
    assert device.free_bytes == device.total_bytes - 5000 * MIB


def test_an_old_driver_counts_its_own_part_in_the_total_but_not_as_free(nvml: FakeNvml) -> None:
    nvml.has_second_memory_query = False
    device = detect()[0]
    assert device.total_bytes == 24576 * MIB
    assert device.free_bytes == (24576 - 452) * MIB
    assert "with the driver's reserve" in device.source


def test_a_card_of_the_catalog_gets_its_speed_and_what_lies_outside_torch_from_there(nvml: FakeNvml) -> None:
    device, row = detect()[0], named("rtx3090")
    assert device.name == "NVIDIA GeForce RTX 3090"
    assert device.bandwidth_bytes_per_second == row.bandwidth_bytes_per_second
    assert device.bf16_flops_per_second == row.bf16_flops_per_second
    assert device.non_torch_bytes == row.non_torch_bytes
    assert device.compute_capability == (8, 6)


def test_the_speed_of_an_unknown_card_stays_unknown_and_what_lies_outside_torch_follows_its_size(
    nvml: FakeNvml,
) -> None:
    nvml.gpus = [FakeGpu("NVIDIA GeForce RTX 4090 Laptop GPU", A, total_mib=16376, capability=(8, 9), cores=9728)]
    (device,) = detect()
    assert device.bandwidth_bytes_per_second is None
    assert device.bf16_flops_per_second is None
    ruled = overhead(9728 // 128, (8, 9))
    assert ruled is not None
    assert device.non_torch_bytes == ruled.total_bytes


def test_an_unknown_card_that_tells_no_size_gets_the_largest_figure_and_says_so(nvml: FakeNvml) -> None:
    nvml.gpus = [FakeGpu("NVIDIA Something New", A, capability=(99, 0), cores=None)]
    (device,) = detect()
    assert device.non_torch_bytes == max(card.non_torch_bytes for card in catalog())
    assert "outside torch: unknown" in device.source


def test_a_card_that_does_not_tell_its_memory_is_an_error(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: FakeGpu, version: int | None = None) -> SimpleNamespace:
        raise FakeNvmlError("Not Supported")

    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", refuse)
    with pytest.raises(UnreadableGpuError, match="Not Supported"):
        detect()
    assert nvml.started == 0


def test_a_split_card_shows_its_first_instance_with_that_instances_memory(nvml: FakeNvml) -> None:
    nvml.gpus = [split_a100(None, FakeInstance(X, 4864, used_mib=1000), FakeInstance(Y, 9856))]
    (device,) = detect()
    assert device.name.endswith("MIG 1g.5gb")
    assert device.total_bytes == 4864 * MIB
    assert device.free_bytes == 3864 * MIB
    assert device.bandwidth_bytes_per_second is None
    ruled = overhead(14, (8, 0))
    assert ruled is not None
    assert device.non_torch_bytes == ruled.total_bytes


def test_an_instance_hides_whole_cards(nvml: FakeNvml) -> None:
    nvml.gpus = [rtx3090(A), split_a100(FakeInstance(X, 4864))]
    (device,) = detect()
    assert device.total_bytes == 4864 * MIB
    assert device.index == 1
    assert device.uuid is not None
    assert device.uuid.startswith("MIG-")


def test_a_split_card_without_instances_shows_nothing(nvml: FakeNvml) -> None:
    nvml.gpus = [split_a100(None, None)]
    assert detect() == ()


@pytest.mark.parametrize(
    ("wanted", "shown_mib"),
    [
        (Y, [9856]),
        ("MIG-yyyy", [9856]),
        (f"MIG-{C}/9/1", [9856]),
        (f"{Y},{X}", [9856]),
        ("MIG-zzzz", []),
        ("0", [4864]),
        ("GPU-bbbb3", [4864]),
    ],
)
def test_an_instance_is_chosen_by_its_uuid_by_its_numbers_or_through_its_card(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, wanted: str, shown_mib: list[int]
) -> None:
    nvml.gpus = [split_a100(FakeInstance(X, 4864), FakeInstance(Y, 9856, gpu_instance=9, compute_instance=1))]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    assert [device.total_bytes // MIB for device in detect()] == shown_mib


def test_the_host_is_a_device_with_this_machines_memory() -> None:
    cpu = host()
    assert (cpu.name, cpu.origin) == ("cpu", "cpu")
    assert 0 < cpu.free_bytes <= cpu.total_bytes
    assert cpu.non_torch_bytes == HOST_NON_TORCH_BYTES == 768 * MIB


def test_looking_for_devices_does_not_load_torch() -> None:
    code = "import sys; from autotrain_mem.machine.detect import *; detect(); host(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
