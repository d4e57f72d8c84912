"""Who else is on a card, by NVML's word; on cards that are not here, and where NVML says nothing, nobody."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from autotrain_mem.machine.other_processes import NOBODY, held_by, others_on
from autotrain_mem.spec import Hardware, OtherProcess
from autotrain_mem.units import GIB, MIB

CARD = Hardware(
    name="card", origin="detected", total_bytes=24 * GIB, free_bytes=20 * GIB, non_torch_bytes=GIB, uuid="GPU-1"
)
DRIVER = 300 * MIB
"""What the driver keeps for itself."""
STRANGER = 1 << 30
"""A process number that no system gives."""


class FakeNvmlError(Exception):
    """What NVML raises for a question that it does not answer."""


@dataclass
class FakeNvml:
    """One card, with the bytes of the processes that compute and that draw on it."""

    compute: dict[int, int | None] = field(default_factory=dict)
    graphics: dict[int, int | None] | None = field(default_factory=dict)
    """None on a card that draws nothing."""
    hidden_bytes: int = 0
    """Held by processes that are not listed."""
    started: int = 0
    answers: bool = True
    has_second_version: bool = True

    NVMLError = FakeNvmlError
    nvmlMemory_v2 = 2

    def nvmlInit(self) -> None:
        if not self.answers:
            raise FakeNvmlError
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.started -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return _listed(self.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:
        if self.graphics is None:
            raise FakeNvmlError
        return _listed(self.graphics)

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> Any:
        if version is not None and not self.has_second_version:
            raise FakeNvmlError
        held = {**(self.graphics or {}), **self.compute}
        taken = sum(size or 0 for size in held.values()) + self.hidden_bytes
        return SimpleNamespace(total=24 * GIB, reserved=DRIVER, free=24 * GIB - DRIVER - taken)


def _listed(held: dict[int, int | None]) -> list[Any]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in held.items()]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    return fake


def test_processes_are_named_largest_first(nvml: FakeNvml) -> None:
    nvml.compute = {STRANGER: GIB, os.getpid(): 2 * GIB}
    own, other = others_on(CARD)
    assert (own.pid, own.used_bytes) == (os.getpid(), 2 * GIB)
    assert own.name
    assert other == OtherProcess(pid=STRANGER, name="", used_bytes=GIB)
    assert nvml.started == 0


def test_one_that_computes_and_draws_is_one(nvml: FakeNvml) -> None:
    nvml.compute, nvml.graphics = {STRANGER: GIB}, {STRANGER: GIB, STRANGER + 1: 100 * MIB}
    assert [(other.pid, other.used_bytes) for other in others_on(CARD)] == [
        (STRANGER, GIB),
        (STRANGER + 1, 100 * MIB),
    ]


def test_a_card_that_draws_nothing_is_asked_all_the_same(nvml: FakeNvml) -> None:
    nvml.compute, nvml.graphics = {STRANGER: GIB}, None
    assert [other.pid for other in others_on(CARD)] == [STRANGER]


def test_what_nobody_is_listed_for_is_told_as_others(nvml: FakeNvml) -> None:
    """As in a container, or on Windows, where processes are listed without their bytes."""
    nvml.compute, nvml.hidden_bytes = {STRANGER: None}, 3 * GIB
    assert others_on(CARD)[0] == OtherProcess(pid=NOBODY, name="", used_bytes=3 * GIB)


def test_the_drivers_own_is_nobodys(nvml: FakeNvml) -> None:
    assert others_on(CARD) == ()


def test_a_driver_that_does_not_tell_its_own_tells_of_nobody_unlisted(nvml: FakeNvml) -> None:
    nvml.has_second_version, nvml.hidden_bytes, nvml.compute = False, 3 * GIB, {STRANGER: GIB}
    assert [other.pid for other in others_on(CARD)] == [STRANGER]


def test_what_one_process_holds_is_told(nvml: FakeNvml) -> None:
    nvml.compute = {STRANGER: GIB, STRANGER + 1: None}
    assert held_by(CARD, STRANGER) == GIB
    assert held_by(CARD, STRANGER + 1) is None
    assert held_by(CARD, STRANGER + 2) is None


def test_a_card_that_is_not_here_has_nobody_on_it(nvml: FakeNvml) -> None:
    nvml.compute = {STRANGER: GIB}
    named = Hardware(name="rtx", origin="named", total_bytes=GIB, free_bytes=GIB, non_torch_bytes=0)
    assert others_on(named) == ()
    assert held_by(named, STRANGER) is None


def test_without_nvml_nobody_is_known(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.answers = False
    assert (others_on(CARD), held_by(CARD, 1)) == ((), None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (others_on(CARD), held_by(CARD, 1)) == ((), None)
