"""A run's history is read from whatever files it has left so far."""

import json
from pathlib import Path
from typing import Any

import pytest

from autotrain_mem.report.run_history import read_history
from autotrain_mem.run.run_figures import EventLog
from autotrain_mem.types import Phase
from autotrain_mem.types.experience import EVENTS_NAME, RECORD_NAME

DEVICE = {
    "allocated_bytes": 10,
    "peak_allocated_bytes": 20,
    "reserved_bytes": 30,
    "peak_reserved_bytes": 40,
    "num_alloc_retries": 0,
}


def write(path: Path, *events: dict[str, Any], cut: str = "") -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + cut)


def a_run(folder: Path) -> None:
    begin = {"event": "start", "time": 100.0, "step": 0}
    write(
        folder / RECORD_NAME,
        begin | {"total_bytes": 99, "predicted_bytes": {"forward": 20}},
        {"event": "sample", "time": 105.0, "step": 5, "device": DEVICE, "tokens_per_second": 7.5},
        cut='{"event": "sample", "time": 110.0, "st',
    )
    write(folder / "memory.rank1.jsonl", {"event": "sample", "time": 105.5, "step": 5, "device": DEVICE})
    incident = {"step": 6, "phase": "forward", "remedy": "split in two", "message": ""}
    write(
        folder / EVENTS_NAME,
        begin | {"total_steps": 60},
        {"event": "log", "time": 105.1, "step": 5, "logs": {"loss": 2.5, "memory/retries": 0.0}},
        {"event": "incident", "time": 106.0, "incident": incident},
        {"event": "checkpoint", "time": 107.0, "step": 6, "path": "run/checkpoint-6"},
        {"event": "log", "time": 111.0, "step": 10, "logs": {"loss": 2.0}},
    )


def test_what_was_measured_and_logged_at_a_step_is_one_moment(tmp_path: Path) -> None:
    a_run(tmp_path)
    history = read_history(tmp_path)
    assert history is not None
    first, second = history.moments
    assert (first.step, first.seconds, first.tokens_per_second, first.logs) == (5, 5.0, 7.5, {"loss": 2.5})
    assert first.device is not None
    assert first.device.peak_reserved_bytes == 40
    assert (second.step, second.device, second.logs) == (10, None, {"loss": 2.0})
    assert [moment.step for moment in history.ranks[1]] == [5]
    assert (history.total_steps, history.total_bytes, history.predicted_bytes) == (60, 99, {Phase.FORWARD: 20})
    assert [(each.kind, each.step) for each in history.happenings] == [
        ("start", 0),
        ("out of memory", 6),
        ("checkpoint", 6),
    ]
    assert "split in two" in history.happenings[1].text
    assert history.ending == ""


def test_a_run_has_ended_until_another_process_begins(tmp_path: Path) -> None:
    assert read_history(tmp_path) is None
    log = EventLog(tmp_path)
    log.see({"event": "start", "step": 0, "total_steps": 3})
    log.see({"event": "pulse", "step": 1})
    log.end("failed")
    failed = read_history(tmp_path)
    assert failed is not None
    assert (failed.ending, [each.kind for each in failed.happenings]) == ("failed", ["start", "end"])
    log.see({"event": "start", "step": 1, "total_steps": 3})
    again = read_history(tmp_path)
    assert again is not None
    assert again.ending == ""


def test_what_is_no_number_is_not_written(tmp_path: Path) -> None:
    EventLog(tmp_path).see({"event": "log", "step": 1, "logs": {"loss": float("nan"), "reward": 1.0, "memory/x": 2.0}})
    (line,) = (tmp_path / EVENTS_NAME).read_text().splitlines()
    assert json.loads(line, parse_constant=lambda constant: pytest.fail(constant))["logs"] == {"reward": 1.0}


def test_steps_that_come_fast_are_written_a_second_apart(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for step in range(50):
        log.see({"event": "step", "step": step, "memory": None})
    assert len((tmp_path / EVENTS_NAME).read_text().splitlines()) == 1
    EventLog(tmp_path / EVENTS_NAME).see({"event": "start", "step": 0})  # a file is in the way: ends no training
