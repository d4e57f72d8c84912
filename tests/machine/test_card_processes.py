"""Tests the list of processes on a card, with a fake of NVML."""

import os
import sys

import pytest
from fake_nvml import FakeGpu, FakeNvml

from autotrain_mem.machine.card_processes import NOBODY, held_by, others_on
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types.experience import OtherProcess
from autotrain_mem.types.hardware import Hardware

UUID = "GPU-aaaa1111-0000-0000-0000-000000000000"
STRANGER = 1 << 30
"""A process number that no system gives."""
CARD = Hardware(
    name="NVIDIA GeForce RTX 3090",
    origin="detected",
    total_bytes=24 * GIB,
    free_bytes=23 * GIB,
    non_torch_bytes=437 * MIB,
    compute_capability=(8, 6),
    index=0,
    uuid=UUID,
)


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu(UUID)


@pytest.fixture
def nvml(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml([gpu])
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_processes_are_named_largest_first(nvml: FakeNvml, gpu: FakeGpu) -> None:
    gpu.computing = {STRANGER: GIB, os.getpid(): 2 * GIB}
    own, other = others_on(CARD)
    assert (own.pid, own.used_bytes) == (os.getpid(), 2 * GIB)
    assert own.name
    assert other == OtherProcess(pid=STRANGER, name="", used_bytes=GIB)
    assert nvml.started == 0


def test_a_process_that_computes_and_draws_is_listed_once(nvml: FakeNvml, gpu: FakeGpu) -> None:
    gpu.computing, gpu.drawing = {STRANGER: GIB}, {STRANGER: GIB, STRANGER + 1: 100 * MIB}
    listed = [(other.pid, other.used_bytes) for other in others_on(CARD)]
    assert listed == [(STRANGER, GIB), (STRANGER + 1, 100 * MIB)]
    gpu.drawing = None
    assert [other.pid for other in others_on(CARD)] == [STRANGER]


def test_memory_without_a_listed_process_is_reported_except_the_drivers_reserve(nvml: FakeNvml, gpu: FakeGpu) -> None:
    """As in a container, or on Windows, where NVML lists processes without their bytes."""
    assert others_on(CARD) == ()
    gpu.computing, gpu.unlisted_bytes = {STRANGER: None}, 3 * GIB
    assert others_on(CARD)[0] == OtherProcess(pid=NOBODY, name="", used_bytes=3 * GIB)
    gpu.computing = {STRANGER: GIB, STRANGER + 1: None}
    assert [held_by(CARD, STRANGER + more) for more in range(3)] == [GIB, None, None]


def test_no_process_is_known_without_nvml_or_for_a_card_that_is_not_here(
    nvml: FakeNvml, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.computing = {STRANGER: GIB}
    named = Hardware(name="rtx", origin="named", total_bytes=GIB, free_bytes=GIB, non_torch_bytes=0)
    assert (others_on(named), held_by(named, STRANGER)) == ((), None)
    gpu.lost = "GPU is lost"
    assert (others_on(CARD), held_by(CARD, STRANGER)) == ((), None)
    assert nvml.started == 0
    nvml.driver = None
    assert (others_on(CARD), held_by(CARD, 1)) == ((), None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (others_on(CARD), held_by(CARD, 1)) == ((), None)
