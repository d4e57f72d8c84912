"""A run that is watched says what its files say, and no more."""

import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from report_examples import PLAN
from test_console import rendered
from test_page_content import history, moment

from autotrain_mem import api
from autotrain_mem.cli import inspect_commands, main
from autotrain_mem.report.run_view import SPARKS, Watched, spark, watch_line, watch_view
from autotrain_mem.run.run_figures import EventLog
from autotrain_mem.training.run_folder import lock_folder
from autotrain_mem.types.experience import RunHistory

RUNNING = replace(history(*(moment(step, loss=10.0 - step) for step in range(1, 8))), ending="")


def watched(found: RunHistory | None = RUNNING, *, alive: bool | None = True, now: float = 20.0) -> Watched:
    return Watched(name="run", plan=PLAN, history=found, alive=alive, now=now)


def text(each: Watched, columns: int = 100) -> str:
    return rendered(watch_view(each), columns)


def test_a_run_says_how_far_it_is_and_when_it_will_be_done() -> None:
    now = watched()
    assert now.seconds_left == pytest.approx(53.0)  # a second a step, 53 of 60 to go
    shown = text(now)
    assert "running for 20.0 s" in shown
    assert "7 of 60, 53.0 s left" in shown
    assert "3.000, from 9.000" in shown
    assert "step 2  split" in shown
    assert watch_line(now).startswith("step 7/60  loss 3.000  peak 40 B of ")
    assert all(len(line) <= 40 for line in text(now, 40).splitlines())


@pytest.mark.parametrize(
    ("found", "alive", "state", "is_over"),
    [
        (None, True, "starting", False),
        (None, None, "not begun", False),
        (None, False, "not begun", False),
        (RUNNING, False, "stopped without saying why", True),
        (replace(RUNNING, last=190.0), False, "running", False),  # its lock does not reach here, and it writes
        (RUNNING, None, "running", False),
        (replace(RUNNING, ending="finished"), False, "finished", True),
        (replace(RUNNING, ending="failed"), True, "running", False),  # another process goes on with it
    ],
)
def test_a_run_is_over_once_it_says_so_or_nobody_is_at_it(
    found: RunHistory | None, alive: bool | None, state: str, is_over: bool
) -> None:
    now = watched(found, alive=alive, now=200.0)
    assert (now.state, now.is_over) == (state, is_over)
    assert state in text(now)


def test_a_restart_goes_back_to_the_step_of_its_checkpoint() -> None:
    moments = [*RUNNING.moments, moment(4)]
    assert watched(replace(RUNNING, ranks=(tuple(moments),))).step == 4


def test_a_line_of_blocks_goes_from_the_lowest_to_the_highest() -> None:
    assert spark([0.0, 1.0, math.nan, math.inf]) == "▁█"
    assert len(spark([float(each) for each in range(1000)])) == SPARKS
    assert spark([5.0, 5.0]) == "▁▁"
    assert spark([math.nan]) == ""


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
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "step 2/2  loss 1.500  finished"
    assert "checkpoint of step 2" in lines
    assert main.run(["watch", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2" in shown
    assert "finished" in shown
