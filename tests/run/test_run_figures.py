"""A report on several processes, on a run without training, and on losses that are not finite."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from autotrain_mem.run.run_figures import RunFigures
from autotrain_mem.types import MixedLengths, Report
from tests.report.report_examples import PLAN

END = {"event": "end", "interrupted": False, "seconds": 2.0}


def memory(peak: int, retries: int = 0) -> dict[str, int]:
    reserved = {"reserved_bytes": 2, "peak_reserved_bytes": 2 * peak, "num_alloc_retries": retries}
    return {"allocated_bytes": 1, "peak_allocated_bytes": peak, **reserved}


def step(number: int, peak: int | None = None, retries: int = 0) -> dict[str, Any]:
    return {"event": "step", "step": number, "memory": None if peak is None else memory(peak, retries)}


def log(number: int, loss: float, name: str = "loss") -> dict[str, Any]:
    return {"event": "log", "step": number, "logs": {name: loss}}


def start(number: int) -> dict[str, Any]:
    return {"event": "start", "step": number, "total_steps": 9}


def restart(change: str = "") -> dict[str, Any]:
    return {"event": "restart", "restart": {"change": change}}


def not_finite(number: int, *, spoils: bool = True) -> dict[str, Any]:
    return {"event": "not_finite", "step": number, "loss": "nan", "gradient": "nan", "spoils": spoils}


def reported(*events: Mapping[str, Any], steps: int, peak: int | None = None, retries: int = 0, **end: Any) -> Report:
    figures = RunFigures()
    for event in events:
        figures.see(event)
    ended = END | {"steps": steps, "memory": None if peak is None else memory(peak, retries)} | end
    return figures.report(ended, PLAN, "out")


def test_the_predicted_reserved_bytes_are_those_of_mixed_lengths() -> None:
    more = (PLAN.estimate.reserved_bytes + 1,)
    memory = replace(PLAN.estimate.memory, mixed_lengths=MixedLengths(native=more, expandable_segments=more))
    plan = replace(PLAN, estimate=replace(PLAN.estimate, memory=memory))
    report = RunFigures().report(END | {"steps": 1, "memory": None}, plan, "out")
    assert report.predicted_peak_reserved_bytes == plan.estimate.reserved_bytes == more[-1]


@given(st.integers(1, 200), st.integers(1, 200))
def test_the_peak_is_that_of_all_processes_with_the_same_settings(before: int, after: int) -> None:
    def measured(*events: Mapping[str, Any], **end: Any) -> Any:
        return reported(start(0), step(4, before, retries=2), *events, **end).measured

    one = measured(restart(), start(3), step(9, after, 1), steps=9, peak=after, retries=1)
    assert (one.peak_allocated_bytes, one.num_alloc_retries) == (max(before, after), 3)
    assert one.peak_reserved_bytes == 2 * max(before, after)
    moved = measured(restart("--optim adamw_8bit"), start(3), step(9, after), steps=9, peak=after)
    assert moved.peak_allocated_bytes == after, "other settings have another prediction"
    ended = measured(restart(), start(4), steps=4, peak=1)
    assert ended.peak_allocated_bytes == before, "the last process only wrote the model"


def test_a_finished_run_that_is_resumed_has_trained_nothing() -> None:
    report = reported(start(79), log(79, 0.0, "train_loss"), steps=79, peak=100)
    assert (report.has_trained, report.first_loss, report.measured) == (False, None, None)
    report = reported(start(58), log(60, 2.0), log(79, 1.0), steps=79, peak=100)
    assert (report.has_trained, report.began_at, report.first_loss, report.last_loss) == (True, 58, 2.0, 1.0)
    report = reported(start(0), step(3), log(3, 7.5, "train_loss"), steps=3)
    assert (report.first_loss, report.last_loss) == (7.5, 7.5), "shorter than --logging_steps"


def test_a_loss_that_is_no_number_is_none_from_its_step_on() -> None:
    spoilt = [start(0), log(1, 7.7), not_finite(2), log(2, 0.0)]
    report = reported(*spoilt, steps=3)
    assert (report.first_loss, report.last_loss, report.not_finite_step) == (7.7, None, 2)
    assert reported(start(0), not_finite(1), log(1, 0.0, "train_loss"), steps=1).first_loss is None
    mended = reported(*spoilt, restart(), start(1), log(2, 7.6), log(3, 7.5), steps=3)
    assert (mended.last_loss, mended.not_finite_step) == (7.5, None), "it went on from a checkpoint before"
    assert reported(start(0), log(1, 7.7), not_finite(2, spoils=False), log(3, 7.5), steps=3).last_loss == 7.5


def test_a_report_has_the_plans_settings_the_time_and_whether_the_longest_rows_went_first() -> None:
    report = reported(start(0), {"event": "worst_batch", "why_not": ""}, steps=3)
    assert (report.knobs, report.trained) == (PLAN.knobs, PLAN.estimate.memory.trained)
    assert (report.schedule, report.step_tokens) == ("linear", PLAN.estimate.time.tokens)
    assert report.longest_rows_first
    assert report.started_at.endswith("+00:00")
    assert report.started_at <= report.ended_at
    assert not reported(start(0), {"event": "worst_batch", "why_not": "a stream"}, steps=3).longest_rows_first
