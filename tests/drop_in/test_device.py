"""The device of a trainer's process, and what the process may still take of it, with a stand-in for torch.cuda."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotrain_mem.drop_in import device
from autotrain_mem.drop_in.device import device_of, lost_levers, with_own_use
from autotrain_mem.machine.catalog import named
from autotrain_mem.support.errors import UnknownGpuError, UsageError
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import Hardware

CARD = replace(named("rtx4090"), origin="detected", index=0, free_bytes=20 * GIB)
CUDA = torch.device("cuda", 0)


def args(kind: str, index: int | None = None, n_gpu: int = 1) -> Any:
    return SimpleNamespace(device=torch.device(kind, index), n_gpu=n_gpu)


def asked(config: Any, gpu: str | None = None) -> Hardware:
    return device_of(config, gpu, [])


def use_cuda(monkeypatch: pytest.MonkeyPatch, *, allocated_bytes: int, reserved_bytes: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: allocated_bytes)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: reserved_bytes)


def test_without_a_name_it_is_the_device_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    second = replace(CARD, index=1)
    monkeypatch.setattr(device, "cuda_device", (CARD, second).__getitem__)
    assert asked(args("cpu")).origin == "cpu"
    assert asked(args("cuda", 1)) == second
    assert asked(args("cuda")) == CARD
    use_cuda(monkeypatch, allocated_bytes=GIB, reserved_bytes=GIB)
    assert asked(args("cuda", 0)).free_bytes == 20 * GIB + CARD.non_torch_bytes  # the tensor that is there stays


def test_a_named_card_counts_wherever_the_trainer_runs() -> None:
    assert asked(args("mps"), "rtx3060") == named("rtx3060")
    assert asked(args("cpu", n_gpu=2), "80MiB").total_bytes == 80 * MIB
    with pytest.raises(UnknownGpuError):
        asked(args("cpu"), "rtx306")


def test_a_device_that_no_plan_is_for_is_refused() -> None:
    with pytest.raises(UsageError, match=r"(?s)A trainer on mps cannot be rehearsed.*AutoFit\(gpu=...\)"):
        asked(args("mps"))
    with pytest.raises(UsageError, match=r"(?s)sees 2 GPUs.*CUDA_VISIBLE_DEVICES=0.*torchrun"):
        asked(args("cuda", 0, n_gpu=2))


def test_tensors_of_the_models_are_theirs_and_all_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_own_use(CARD, CUDA, []) == CARD, "a card that is not open is nobody's"
    use_cuda(monkeypatch, allocated_bytes=10 * GIB, reserved_bytes=12 * GIB)
    weight, bias = (SimpleNamespace(nbytes=size, device=CUDA) for size in (3 * GIB, 1 * GIB))
    elsewhere = SimpleNamespace(nbytes=5 * GIB, device=torch.device("cpu"))
    models = [  # the weight is shared by both, and a buffer of one of them
        SimpleNamespace(parameters=lambda: [weight, elsewhere], buffers=lambda: [weight]),
        SimpleNamespace(parameters=lambda: [bias, weight], buffers=list),
    ]
    mine_bytes = CARD.non_torch_bytes + 12 * GIB
    room = replace(CARD, free_bytes=2 * GIB)
    assert with_own_use(room, CUDA, models) == replace(room, free_bytes=2 * GIB + mine_bytes - 6 * GIB)
    others = [torch.nn.Linear(4, 4)]
    assert with_own_use(room, CUDA, others) == replace(room, free_bytes=2 * GIB + mine_bytes - 10 * GIB)
    full = replace(CARD, free_bytes=CARD.total_bytes)
    assert with_own_use(full, CUDA, models).free_bytes == CARD.total_bytes


def test_segments_cannot_grow_any_more_once_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost_levers() == ()
    use_cuda(monkeypatch, allocated_bytes=0, reserved_bytes=0)
    assert lost_levers() == ()  # open, but empty
    use_cuda(monkeypatch, allocated_bytes=0, reserved_bytes=2 * MIB)
    (lost,) = lost_levers()
    assert lost.startswith("expandable_segments: ")
    assert "Set PYTORCH_ALLOC_CONF=expandable_segments:True" in lost
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")  # then torch reads the other no longer
    (lost,) = lost_levers()
    assert "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in lost
