"""Who is on a card, with a stand-in for NVML; and what a child that opens a card may answer."""

import os
import pathlib
import sys
import textwrap

import pytest
from fake_nvml import FakeGpu, FakeNvml

from autotrain_mem.machine.card_processes import NOBODY, held_by, others_on
from autotrain_mem.machine.torch_child import NoAnswer, TorchDevice, ask_child, torch_device
from autotrain_mem.support.errors import UnreadableGpuError
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


ANSWERS = {
    "hangs": "import time; time.sleep(600)",
    "fails": """channel.send({"error": "RuntimeError: no kernel image for " + os.environ["SOME"]})""",
    "cannot": """channel.send({"unusable": UnreadableGpuError("too old", hint="Update the driver").to_json()})""",
    "tells": """channel.send({"device": {"total_bytes": 3, "free_bytes": 2, "is_integrated": True}})""",
}


@pytest.fixture
def module(request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a child's module that answers as it is told."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    code = f"""
        import os
        from autotrain_mem.support.errors import UnreadableGpuError
        from autotrain_mem.support.processes import Channel
        channel = Channel(ignore_interrupt=True)
        {ANSWERS[request.param]}
        channel.receive()
    """
    (tmp_path / "some_child.py").write_text(textwrap.dedent(code))
    return "some_child"


@pytest.mark.parametrize(
    ("module", "reason"),
    [("hangs", "no answer within 0 s"), ("fails", "no kernel image for this")],
    indirect=["module"],
)
def test_a_child_that_does_not_answer_says_why(module: str, reason: str) -> None:
    with pytest.raises(NoAnswer, match=reason):
        ask_child(module, {"SOME": "this"}, limit_seconds=0.1 if "within" in reason else 60.0)


@pytest.mark.parametrize("module", ["cannot"], indirect=True)
def test_a_card_that_torch_cannot_use_is_an_error_with_its_cure(module: str) -> None:
    with pytest.raises(UnreadableGpuError, match="too old") as refusal:
        torch_device(UUID, {}, module)
    assert refusal.value.hint == "Update the driver"


@pytest.mark.parametrize("module", ["tells"], indirect=True)
def test_what_torch_sees_of_a_card_is_returned(module: str) -> None:
    assert torch_device(UUID, {}, module) == TorchDevice(total_bytes=3, free_bytes=2, is_integrated=True)


def test_processes_are_named_largest_first(nvml: FakeNvml, gpu: FakeGpu) -> None:
    gpu.computing = {STRANGER: GIB, os.getpid(): 2 * GIB}
    own, other = others_on(CARD)
    assert (own.pid, own.used_bytes) == (os.getpid(), 2 * GIB)
    assert own.name
    assert other == OtherProcess(pid=STRANGER, name="", used_bytes=GIB)
    assert nvml.started == 0


def test_one_that_computes_and_draws_is_one(nvml: FakeNvml, gpu: FakeGpu) -> None:
    gpu.computing, gpu.drawing = {STRANGER: GIB}, {STRANGER: GIB, STRANGER + 1: 100 * MIB}
    assert [(other.pid, other.used_bytes) for other in others_on(CARD)] == [
        (STRANGER, GIB),
        (STRANGER + 1, 100 * MIB),
    ]
    gpu.drawing = None
    assert [other.pid for other in others_on(CARD)] == [STRANGER]


def test_what_nobody_is_listed_for_is_told_as_others_but_for_the_drivers_own(nvml: FakeNvml, gpu: FakeGpu) -> None:
    """As in a container, or on Windows, where processes are listed without their bytes."""
    assert others_on(CARD) == ()
    gpu.computing, gpu.unlisted_bytes = {STRANGER: None}, 3 * GIB
    assert others_on(CARD)[0] == OtherProcess(pid=NOBODY, name="", used_bytes=3 * GIB)
    gpu.computing = {STRANGER: GIB, STRANGER + 1: None}
    assert [held_by(CARD, STRANGER + more) for more in range(3)] == [GIB, None, None]


def test_without_nvml_and_of_a_card_that_is_not_here_nobody_is_known(
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
