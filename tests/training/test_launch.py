"""A training process that is asked to end ends; a probe gives one answer, or why there is none, and leaves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem.machine.catalog import named
from autotrain_mem.support.errors import InterruptedByUser, TrainingError
from autotrain_mem.support.processes import ChildDied
from autotrain_mem.training import launch
from autotrain_mem.training.launch import PROBE_LOG_NAME, SCRATCH_NAME, Event, run_probe
from autotrain_mem.training.rank_processes import RankDied, RankProcesses
from autotrain_mem.training.task import Request, Task
from autotrain_mem.types import Job, Probe

DEAF = """
import signal, time
from autotrain_mem.support.processes import Channel

signal.signal(signal.SIGINT, signal.SIG_IGN)
channel = Channel(ignore_interrupt=False)
channel.receive()
channel.send({"event": "start", "step": 0, "total_steps": 9})
time.sleep(0.2)
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
while not asked:
    time.sleep(0.01)
channel.send({"event": "end", "interrupted": True})
"""
"""Ignores interrupts for a while, as a process does that a shell's ``&`` started, until it has imported its modules."""


def request(task: Task, folder: Path) -> Request:
    job = Job(method="sft", model="m", dataset=None, arguments={})
    hardware = named("300MiB")
    return Request(task=task, job=job, knobs=TRL_DEFAULTS, hardware=hardware, simulate=True, output_dir=str(folder))


def test_a_process_that_was_deaf_to_the_first_interrupt_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    monkeypatch.setattr(launch, "SIMULATED_PROCESS", "deaf")
    monkeypatch.setattr(launch, "INTERRUPT_SECONDS", 0.05)
    root = Path(launch.__file__).parents[2]

    def interrupt(event: Event) -> None:
        if event["event"] == "start":
            raise KeyboardInterrupt

    ended = launch.train(request("train", tmp_path), {"PYTHONPATH": f"{tmp_path}:{root}"}, tmp_path / "log", interrupt)
    assert ended == {"event": "end", "interrupted": True}


class FakeRanks(RankProcesses):
    """One that answers with what it is told to, once it has written a checkpoint."""

    says: list[Mapping[str, Any] | BaseException]

    def __init__(self, module: str, environments: Any, logs: list[Path], *, names: list[str], **more: Any) -> None:
        super().__init__(module, [], [], names=names, silent_seconds=1.0)
        self.calls: list[str] = []
        FakeRanks.last = self

    last: FakeRanks

    def send(self, requests: Sequence[Mapping[str, Any]]) -> None:
        scratch = Path(requests[0]["output_dir"])
        assert [*scratch.iterdir()] == []
        (scratch / "checkpoint-2").mkdir()
        self.scratch = scratch

    def _next(self, wait_seconds: float) -> tuple[int, Event]:
        said = self.says.pop(0)
        if isinstance(said, BaseException):
            raise said
        return 0, {**said}

    def kill(self) -> None:
        self.calls.append("kill")

    def stop(self) -> None:
        self.calls.append("stop")


def run(folder: Path, *says: Mapping[str, Any] | BaseException) -> Probe:
    FakeRanks.says = list(says)
    (folder / SCRATCH_NAME / "checkpoint-1").mkdir(parents=True)  # left by one that was killed
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "RankProcesses", FakeRanks)
            return run_probe(request("probe", folder), {}, folder)
    finally:
        assert FakeRanks.last.scratch == folder / SCRATCH_NAME
        assert not FakeRanks.last.scratch.exists()
        assert FakeRanks.last.calls == ["kill", "stop"]


def test_an_error_of_the_childs_is_raised_with_the_place_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="The trainer raised ValueError") as raised:
        run(tmp_path, TrainingError("The trainer raised ValueError: no", hint="Change the flag.").to_json())
    assert raised.value.hint.splitlines() == [
        "Change the flag.",
        f"The trainer's output is in {tmp_path / PROBE_LOG_NAME}.",
    ]


def test_a_library_that_ends_the_process_on_a_full_card_is_an_answer(tmp_path: Path) -> None:
    words = "Error out of memory at line 89 in file /src/csrc/pythonInterface.cpp"
    made = run(tmp_path, RankDied(0, ChildDied(1, f"step 1\n{words}\n")))
    assert (made.fits, made.refused, made.measured) == (False, words, None)


def test_any_other_end_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(InterruptedByUser, match="no step was trained"):
        run(tmp_path, KeyboardInterrupt())
    with pytest.raises(TrainingError, match=r"ended too early: it was killed by signal 9\.") as raised:
        run(tmp_path, RankDied(0, ChildDied(-9, "loading\n")))
    assert "that host memory ran out" in raised.value.hint
    assert raised.value.hint.endswith("loading")
    with pytest.raises(TrainingError, match="exit status 3"):
        run(tmp_path, RankDied(0, ChildDied(3, "")))
