"""Tests the errors for cards that torch cannot use, with fakes of torch and NVML."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_nvml import FakeGpu, FakeNvml
from nouns import TRL_DEFAULTS

from autotrain_mem.drop_in.device import grow_segments
from autotrain_mem.machine import usable
from autotrain_mem.machine.catalog import named
from autotrain_mem.machine.usable import GpuPackage, NoAnswer, check_usable, examine_package
from autotrain_mem.support.errors import UnreadableGpuError
from autotrain_mem.training.process.build import real_device
from autotrain_mem.training.task import Request
from autotrain_mem.types import Job

UUID = "GPU-aaaa1111-0000-0000-0000-000000000000"
OLD = "The NVIDIA driver on your system is too old (found version 12020).\nPlease update your GPU driver"
KERNELS = "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be ..."
COMPILED = "Torch not compiled with CUDA enabled"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A card that torch can use."""
    fake = FakeGpu(UUID)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUID)
    for name in ("init", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: fake.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: fake.capability)
    for name in ("set_device", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda index: None)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda size, device: ones(size))
    use(monkeypatch, fake, cuda=13000, built_for="13.0")
    return fake


def use(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, *, cuda: int, built_for: str | None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([gpu], driver="535.104", cuda=cuda))
    monkeypatch.setattr(torch.version, "cuda", built_for)


def refusal() -> tuple[str, str]:
    with pytest.raises(UnreadableGpuError) as refused:
        check_usable(0)
    return refused.value.message, refused.value.hint


@pytest.mark.parametrize(
    ("error", "driver_cuda", "built_for", "cures"),
    [
        (RuntimeError(OLD), 12020, "13.0", ["driver 580 or newer, and 535.104 is installed", "whl/cu126"]),
        (RuntimeError(OLD), 11040, "12.6", ["driver 525 or newer", "there is none for this driver"]),
        (AssertionError(COMPILED), 12020, None, ["built without CUDA", "whl/cu126"]),
        (AssertionError(COMPILED), 13020, None, ["whl/cu130"]),
        (RuntimeError("unknown error"), 13000, "13.0", ["need a reboot", "wsl/lib", "CAPABILITIES=compute,utility"]),
    ],
)
def test_the_message_is_torchs_and_the_fix_follows_from_driver_and_build(
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    driver_cuda: int,
    built_for: str | None,
    cures: list[str],
) -> None:
    use(monkeypatch, gpu, cuda=driver_cuda, built_for=built_for)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=error))
    message, hint = refusal()
    assert " ".join(str(error).split()) in message
    assert [cure for cure in (*cures, "--gpu NAME --plan_only", "--use_cpu") if cure not in hint] == []


def test_a_full_card_is_usable_and_one_without_kernels_in_this_build_is_not(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_usable(0)
    monkeypatch.setattr(torch, "ones", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    check_usable(0)
    monkeypatch.setattr(torch, "ones", Mock(side_effect=RuntimeError(KERNELS)))
    gpu.capability = (7, 0)
    message, hint = refusal()
    assert message.endswith("execution on the device")
    assert "before Turing" in hint
    assert "whl/cu126" in hint


def test_a_virtual_card_that_refuses_expandable_segments_is_explained(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    hardware = replace(named("rtx3090"), origin="detected", uuid=UUID)
    job = Job(method="sft", model="m", dataset=None, arguments={})
    knobs = replace(TRL_DEFAULTS, processes=processes)
    request = Request(task="probe", job=job, knobs=knobs, hardware=hardware, simulate=False, output_dir=".")
    with real_device(request):
        assert set(contexts) == {opened}
        assert f"cuda:{current[0]}" == opened
    contexts.clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda text: None)
    grow_segments(torch.device("cuda", 2))  # a drop-in trainer under torchrun
    assert set(contexts) == {"cuda:2"}


@pytest.mark.parametrize(
    ("code", "seconds", "says"),
    [
        ("import time; time.sleep(600)", 1.0, "within 1 s"),
        ("import os; os.kill(os.getpid(), 11)", 60.0, "status -11"),
        ("raise ValueError(3)", 60.0, "ValueError"),
    ],
)
def test_a_package_that_hangs_crashes_or_fails_on_import_says_so(
    code: str, seconds: float, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "package_of_code.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(NoAnswer, match=says):
        examine_package("package_of_code", {}, seconds)


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
