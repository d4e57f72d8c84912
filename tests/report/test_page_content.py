"""What a report's page says of a plan and of a run, and what a watched run says: every figure is the plan's own or is
in the files that the run has left so far, and nothing is made up."""

import json
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_examples import MIXED, PLAN, REPORT, estimate
from test_console import rendered

from autotrain_mem import api
from autotrain_mem.cli import inspect_commands, main
from autotrain_mem.report.formatting import command_of
from autotrain_mem.report.page.content import page_of
from autotrain_mem.report.page.render import page_html
from autotrain_mem.report.run_history import read_history
from autotrain_mem.report.run_view import RunSnapshot, watch_line, watch_view
from autotrain_mem.run.report_material import material_of
from autotrain_mem.run.run_figures import EventLog
from autotrain_mem.support import codec
from autotrain_mem.support.store import Store
from autotrain_mem.training.run_folder import lock_folder
from autotrain_mem.types import DataProfile, Material, MemoryReading, Page, Phase, Plan
from autotrain_mem.types.experience import EVENTS_NAME, RECORD_NAME, RunHistory, RunMarker, StepReading
from tests.report.page import page_examples

DEVICE = MemoryReading(
    allocated_bytes=10, peak_allocated_bytes=20, reserved_bytes=30, peak_reserved_bytes=40, num_alloc_retries=0
)


def moment(step: int, reserved_bytes: int = 30, **logs: float) -> StepReading:
    device = replace(DEVICE, reserved_bytes=reserved_bytes)
    return StepReading(seconds=float(step), step=step, device=device, tokens_per_second=100.0, logs=logs)


def history(*moments: StepReading) -> RunHistory:
    split = RunMarker(seconds=2.0, step=2, kind="out of memory", text="split")
    made_up = page_examples.history(3)
    return replace(made_up, last=10.0, total_steps=60, phases={}, ranks=(moments,), happenings=(split,))


def page(plan: Plan = PLAN, **more: object) -> Page:
    return page_of(Material(plan=plan, command="autofit plan sft", **more))  # type: ignore[arg-type]


def section(found: Page, key: str) -> Any:
    (one,) = (each for each in found.sections if each.key == key)
    return one.figure or one


def test_a_plans_page_has_its_figures_and_all_its_attempts() -> None:
    found = page()
    assert found.is_good is PLAN.estimate.fits
    assert found.verdict.startswith("fits ")
    attempts = section(found, "attempts")
    assert len(attempts.rows) == len(PLAN.attempts)
    assert attempts.strong == (4,)
    assert "> chosen; as asked for max_length 768, " in attempts.note
    assert [row[0] for row in section(found, "changes").rows] == [
        lever.name for lever in sorted(PLAN.levers, key=lambda each: each.harm)
    ]
    keys = [each.key for each in found.sections]
    assert len({*keys}) == len(keys)
    assert all(len(row) == len(each.columns) for each in found.sections for row in each.rows)
    (predicted,) = section(found, "phases")["lines"]
    assert predicted["values"] == [*map(float, PLAN.estimate.memory.phases.values())]
    assert "predicted" in found.how_to_read[-1]
    assert "lengths" not in keys
    lengths = section(page(profile=DataProfile(rows_by_length={10: 5, 31: 1, 768: 1, 769: 1})), "lengths")
    assert [2**edge for edge in lengths["x"]] == pytest.approx([10, 30, 88, 260, 770])
    shares = [(line["name"], line["values"]) for line in lengths["lines"]]
    assert shares == [("longer than 768", [0, 0, 0, 12.5, 0]), ("up to 768", [62.5, 12.5, 0, 12.5, 0])]
    assert [*lengths["verticals"]] == ["max_length 768: 12.5 % are longer"]


def test_a_runs_page_keeps_the_highest_of_many_moments_and_marks_what_happened() -> None:
    moments = [moment(step, reserved_bytes=999 if step == 3333 else 30, loss=1.0) for step in range(5000)]
    found = page(history=history(*moments), report=REPORT)
    notes = {name: note for name, _, note in found.key_figures}
    assert notes["peak allocated"] == "predicted; measured 7.40 GiB (+0.2 %)"
    assert found.is_good
    assert found.verdict.startswith("finished: 120 steps in 3 min 20 s, loss 2.314 -> 1.870, peak 8.20 GiB reserved, ")
    assert found.assessment[0] == "Split; a smaller --per_device_train_batch_size avoids this work"
    assert found.assessment[1].startswith("Slow: 100 tokens/s, predicted 1,240; if the GPU waits for data")
    memory = section(found, "memory-of-the-run")
    assert len(memory["x"]) < len(moments)
    assert max(memory["lines"][1]["values"]) == 999.0
    assert [mark["text"] for mark in memory["marks"]] == ["split"]
    notes = {each.key: each.note for each in found.sections}
    held = "Peak reserved stays at 40 B. Reserved begins at 30 B and ends at 30 B, and is between 30 B and 999 B."
    assert notes["memory-of-the-run"].startswith(held)
    assert " The budget for torch is 11.0 GiB. " in notes["memory-of-the-run"]
    assert notes["memory-of-the-run"].endswith(". Marked: out of memory (1).")
    assert notes["phases"] == "Highest: tensors, predicted 7.42 GiB, in backward."
    assert memory["limits"]["predicted peak reserved"] == PLAN.estimate.reserved_bytes
    assert [each.key for each in found.sections if each.key in ("loss", "reward", "speed")] == ["loss", "speed"]


def test_a_runs_page_is_headed_by_what_came_of_it() -> None:
    kinds = ("restart", "restart", "warning", "end")
    marks = tuple(RunMarker(seconds=2.0, step=2, kind=kind, text=kind) for kind in kinds)
    again = "2 times, most recently: restart"
    continues = "The same command with --resume_from_checkpoint continues from the last checkpoint"
    for ending, report, verdict, sentences in (
        ("failed", REPORT, "failed at step 4 of 60", ("End", again, "Warning")),  # the report is of an earlier run here
        ("", None, "not ended at step 4 of 60", (again, "Warning", continues)),
        ("interrupted", REPORT, "interrupted: 120 steps in 3 min", (again, "Warning", continues)),
    ):
        found = page(history=replace(history(moment(4)), ending=ending, happenings=marks), report=report)
        assert found.verdict.startswith(verdict)
        assert (found.assessment, found.is_good) == (sentences, False)


def test_hours_and_ranks_are_shown_where_they_are_known() -> None:
    mixed = replace(PLAN, estimate=replace(estimate(), memory=replace(estimate().memory, mixed_lengths=MIXED)))
    ranks = replace(history(moment(1), moment(2)), ranks=((moment(1), moment(2)), (moment(2, 50),)))
    found = page(mixed, history=ranks)
    assert any(each.note.startswith("Longest rows first rises from ") for each in found.sections)
    assert [line["name"] for line in section(found, "hours")["lines"]] == ["longest rows first"]
    assert [line["values"] for line in section(found, "ranks")["lines"]] == [[40.0, 40.0], [None, 40.0]]
    unmeasured = (replace(moment(1), device=None),)
    assert page(history=replace(ranks, ranks=(unmeasured, unmeasured))).sections  # nothing of the ranks is drawn
    assert command_of(PLAN, trains=True).startswith(f"autofit {PLAN.method} --model {PLAN.model}")
    html = page_html(found)
    assert all(each.title in html for each in found.sections)


RUNNING = replace(history(*(moment(step, loss=10.0 - step) for step in range(1, 8))), ending="")


def watched(found: RunHistory | None = RUNNING, *, alive: bool | None = True, now: float = 20.0) -> RunSnapshot:
    return RunSnapshot(name="run", plan=PLAN, history=found, alive=alive, now=now)


def test_a_run_says_how_far_it_is_and_when_it_will_be_done() -> None:
    now = watched()
    assert now.seconds_left == pytest.approx(53.0)  # a second a step, 53 of 60 to go
    shown = rendered(watch_view(now))
    for words in ("running for 20.0 s", "7 of 60, 53.0 s left", "3.000, from 9.000", "step 2  split"):
        assert words in shown
    line = watch_line(now)
    assert line.startswith("step 7 of 60, 53.0 s left; memory peak 40 B of ")
    assert line.endswith("; loss 3.000, from 9.000; speed 100 tokens/s, predicted 1,240")
    assert all(len(line) <= 40 for line in rendered(watch_view(now), 40).splitlines())
    assert watched(replace(RUNNING, ranks=((*RUNNING.moments, moment(4)),))).step == 4  # back at a checkpoint


def test_a_run_is_over_once_it_says_so_or_nobody_is_at_it() -> None:
    for found, alive, state, is_over in (
        (None, True, "starting", False),
        (None, None, "not begun", False),
        (None, False, "not begun", False),
        (RUNNING, False, "stopped for an unknown reason", True),
        (replace(RUNNING, last=190.0), False, "stopped for an unknown reason", True),  # its lock is free
        (replace(RUNNING, last=190.0), None, "running", False),  # its lock does not reach here, and it writes
        (RUNNING, None, "stopped for an unknown reason", True),
        (replace(RUNNING, ending="finished"), False, "finished", True),
        (replace(RUNNING, ending="failed"), True, "running", False),  # another process goes on with it
    ):
        now = watched(found, alive=alive, now=200.0)
        assert (now.state, now.is_over) == (state, is_over)
        assert state in rendered(watch_view(now)), (found, alive)


def test_watch_follows_a_run_to_its_end_and_refuses_what_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect_commands, "LOOK_SECONDS", 0.01)
    assert main.run(["watch", str(tmp_path)]) == 2
    assert main.run(["watch", str(tmp_path / "gone")]) == 2
    assert "Give the --output_dir" in capsys.readouterr().err
    log = EventLog(tmp_path)
    log.see({"event": "start", "step": 0, "total_steps": 2})
    follower = threading.Thread(target=inspect_commands.watch, args=([str(tmp_path)],))
    with lock_folder(str(tmp_path)):
        assert api.is_under_way(tmp_path)
        follower.start()
        log.see({"event": "log", "step": 2, "logs": {"loss": 1.5}})
        log.see({"event": "checkpoint", "step": 2, "path": "checkpoint-2"})
        log.end("finished", 2)
        follower.join(0.2)
        assert follower.is_alive()  # the process is still at it
    follower.join(10)
    assert not follower.is_alive()
    assert api.is_under_way(tmp_path) is False
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "another")
        assert api.is_under_way(tmp_path) is None
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "step 2 of 2; loss 1.500, from 1.500; finished"
    assert "checkpoint of step 2" in lines
    assert main.run(["watch", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2" in shown
    assert "finished" in shown
    PLAN.save(tmp_path)
    (tmp_path / "checkpoint-2").mkdir()
    log.see({"event": "start", "step": 2, "total_steps": 4})
    inspect_commands.watch([str(tmp_path)])  # nobody is at it: that is seen at once
    shown = capsys.readouterr().out
    assert shown.endswith(f"autofit {PLAN.method} --output_dir {tmp_path} --resume_from_checkpoint  continues it.\n")


def test_what_was_measured_and_logged_at_a_step_is_one_moment(tmp_path: Path) -> None:
    begin, device = {"event": "start", "time": 100.0, "step": 0}, codec.to_json(DEVICE)
    sample = {"event": "sample", "time": 105.0, "step": 5, "device": device, "tokens_per_second": 7.5}
    incident = {"step": 6, "phase": "forward", "remedy": "split in two", "message": ""}
    written: dict[str, list[dict[str, Any]]] = {
        RECORD_NAME: [begin | {"total_bytes": 99, "predicted_bytes": {"forward": 20}}, sample],
        "memory.rank1.jsonl": [sample],
        EVENTS_NAME: [
            begin | {"total_steps": 60},
            {"event": "log", "time": 105.1, "step": 5, "logs": {"loss": 2.5, "memory/retries": 0.0}},
            {"event": "incident", "time": 106.0, "incident": incident},
            {"event": "checkpoint", "time": 107.0, "step": 6, "path": "run/checkpoint-6"},
            {"event": "log", "time": 111.0, "step": 10, "logs": {"loss": 2.0}},
        ],
    }
    for name, events in written.items():
        torn = '{"event": "sample", "time": 110.0, "st'
        (tmp_path / name).write_text("".join(f"{json.dumps(event)}\n" for event in events) + torn)
    history = read_history(tmp_path)
    assert history is not None
    first, second = history.moments
    assert (first.step, first.seconds, first.tokens_per_second, first.logs) == (5, 5.0, 7.5, {"loss": 2.5})
    assert first.device is not None
    assert first.device.peak_reserved_bytes == 40
    assert (second.step, second.device, second.logs) == (10, None, {"loss": 2.0})
    assert [moment.step for moment in history.ranks[1]] == [5]
    assert (history.total_steps, history.total_bytes, history.predicted_bytes) == (60, 99, {Phase.FORWARD: 20})
    happened = [("start", 0), ("out of memory", 6), ("checkpoint", 6)]
    assert [(each.kind, each.step) for each in history.happenings] == happened
    assert "split in two" in history.happenings[1].text
    assert history.ending == ""


def test_a_run_has_ended_until_another_process_begins(tmp_path: Path) -> None:
    assert read_history(tmp_path) is None
    log = EventLog(tmp_path)
    log.see({"event": "start", "step": 0, "total_steps": 3})
    log.see({"event": "pulse", "step": 1})
    log.end("failed", why="no room")
    failed = read_history(tmp_path)
    assert failed is not None
    assert failed.ending == "failed"
    assert [(each.kind, each.text) for each in failed.happenings] == [("start", "training begins"), ("end", "no room")]
    log.see({"event": "start", "step": 1, "total_steps": 3})
    again = read_history(tmp_path)
    assert again is not None
    assert again.ending == ""


def test_a_log_leaves_out_nan_writes_fast_steps_a_second_apart_and_never_fails(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.see({"event": "log", "step": 1, "logs": {"loss": float("nan"), "reward": 1.0, "memory/x": 2.0}})
    for step in range(50):
        log.see({"event": "step", "step": step, "memory": None})
    line, _ = (tmp_path / EVENTS_NAME).read_text().splitlines()
    assert json.loads(line)["logs"] == {"reward": 1.0}
    EventLog(tmp_path / EVENTS_NAME).see({"event": "start", "step": 0})  # a file is in the way


def test_a_line_that_was_changed_is_left_out_and_a_value_within_one_is_told(tmp_path: Path) -> None:
    sound = '{"event": "start", "step": 0, "total_steps": 9, "time": 1.0}\n'
    odd = (
        '{"event": ' + "[" * 100_000,
        '{"event": "note", "message": "\\ud800", "time": 2}',
        '{"event": "x", "time": 1e400}',
    )
    (tmp_path / EVENTS_NAME).write_text("\n".join((sound.strip(), *odd, '{"event": "log", "step": "x", "time": 2}\n')))
    history = read_history(tmp_path)
    assert history is not None
    assert (history.last, history.total_steps) == (1.0, 9)
    (tmp_path / EVENTS_NAME).write_text(sound + '{"event": "step", "memory": {"allocated_bytes": 1}, "time": 2}\n')
    with pytest.raises(OSError, match="its events were changed: Object missing required field"):
        read_history(tmp_path)
    PLAN.save(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(codec.to_json(REPORT) | {"seconds": float("inf")}))
    material = material_of(tmp_path, Store(None))
    assert (material.report, material.history) == (None, None)
    assert any("its events were changed" in each for each in material.not_shown)
