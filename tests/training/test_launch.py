"""A training process that is asked to end ends, even where the first asking does not reach it."""

from __future__ import annotations

from pathlib import Path

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem.machine.catalog import named
from autotrain_mem.spec import Job
from autotrain_mem.training import launch
from autotrain_mem.training.launch import Event
from autotrain_mem.training.request import Request

DEAF = """
import signal, time
from autotrain_mem.processes import Channel

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


def test_a_process_that_was_deaf_to_the_first_interrupt_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    monkeypatch.setattr(launch, "RUN_PROCESS", "deaf")
    monkeypatch.setattr(launch, "INTERRUPT_SECONDS", 0.05)
    root = Path(launch.__file__).parents[2]
    job = Job(method="sft", model="m", dataset=None, arguments={})
    request = Request(
        task="train",
        job=job,
        knobs=TRL_DEFAULTS,
        hardware=named("300MiB"),
        simulate=True,
        output_dir=str(tmp_path),
    )

    def interrupt(event: Event) -> None:
        if event["event"] == "start":
            raise KeyboardInterrupt

    ended = launch.train(request, {"PYTHONPATH": f"{tmp_path}:{root}"}, tmp_path / "log", interrupt)
    assert ended == {"event": "end", "interrupted": True}
