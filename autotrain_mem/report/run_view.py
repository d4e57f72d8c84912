"""Shows a run: its progress, read from its files while it trains, and its report once it has ended."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import BAD, GOOD, QUIET, Indented, add, hanging, table
from autotrain_mem.support.units import counted, duration, format_bytes, rate
from autotrain_mem.types import REWARD_NAMES, Plan, Report
from autotrain_mem.types.experience import RunHistory, RunMarker

BAR_WIDTH = 24
SHORT_RUN_ERROR = 0.02
"""The largest prediction error of a run that has trained on its longest rows; a peak further below the prediction means
that it has not."""
SHOWN_HAPPENINGS = 6
_TROUBLES = dict.fromkeys(("end", "restart", "warning"), "") | {
    "out of memory": "; a smaller --per_device_train_batch_size avoids this work"
}
"""Kind of a marker, gravest first -> advice that its text lacks."""
SLOW = 0.5
"""A run counts as slow below this share of the predicted speed."""
SILENT_SECONDS = 60.0
"""Seconds without a write after which a run counts as dead if no lock shows whether its process is alive."""
PACE_SECONDS = 120.0
"""Seconds over which the pace is measured to predict the time left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSnapshot:
    """Holds the state of a run at one moment."""

    name: str
    """The name of the run's folder."""
    plan: Plan | None
    history: RunHistory | None
    alive: bool | None
    """Whether the run's process is alive; None if unknown."""
    now: float
    """Seconds since the epoch."""

    @property
    def is_over(self) -> bool:
        """Returns whether nothing more will be written. A run that has not begun is not over."""
        if self.history is None or self.alive:
            return False
        return bool(self.history.ending) or self.alive is False or self.now - self.history.last > SILENT_SECONDS

    @property
    def step(self) -> int:
        if self.history is None:
            return 0
        return self.history.moments[-1].step if self.history.moments else 0  # lower again after a restart

    @property
    def state(self) -> str:
        if self.history is None:
            return "starting" if self.alive else "not begun"
        if self.history.ending and self.alive is not True:
            return self.history.ending
        return "stopped for an unknown reason" if self.is_over else "running"

    @property
    def seconds(self) -> float:
        """Returns how long the run has taken so far."""
        if self.history is None:
            return 0.0
        return (self.history.last if self.is_over else self.now) - self.history.began

    @property
    def seconds_left(self) -> float | None:
        """Returns the time to the last step at the pace of the last minutes; None if unknown."""
        if (history := self.history) is None or history.total_steps is None or self.is_over:
            return None
        moments = [moment for moment in history.moments if moment.step]
        recent = [moment for moment in moments if moment.seconds >= moments[-1].seconds - PACE_SECONDS]
        if len(recent) < 2 or recent[-1].step <= recent[0].step:
            return None
        pace = (recent[-1].seconds - recent[0].seconds) / (recent[-1].step - recent[0].step)
        return max(0.0, pace * (history.total_steps - self.step))


def watch_view(watched: RunSnapshot) -> RenderableType:
    """Draws a run on a terminal."""
    history, plan, state = watched.history, watched.plan, watched.state
    what = "" if plan is None else f"  {plan.method}, {plan.model} on {formatting.cards(plan.estimate.hardware)}"
    taken = f" for {duration(watched.seconds)}" if state == "running" else ""
    after = f" after {duration(watched.seconds)}" if watched.is_over and history else ""
    style = GOOD if state in ("running", "finished", "starting") else BAD
    headline = Text.assemble((watched.name, "bold"), what, "  ", (f"{state}{taken}{after}", style))
    if history is None:
        return Group(headline, Text("nothing has been written yet", style=QUIET))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=QUIET, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_column(width=BAR_WIDTH, no_wrap=True)
    for name, text, bar in _facts(watched, history):
        grid.add_row(name, text, bar)
    lines = happening_lines(history.happenings)
    parts: list[RenderableType] = [headline, grid]
    parts += [Text(), *map(hanging, lines[-SHOWN_HAPPENINGS:])] if lines else []
    if len(lines) > SHOWN_HAPPENINGS:
        parts.append(Text(f"and {len(lines) - SHOWN_HAPPENINGS} before", style=QUIET))
    return Group(*parts)


def watch_line(watched: RunSnapshot) -> str:
    """Writes a run in one line: ``step 312 of 1,403, 41 min 03 s left; memory peak 10.8 of 11.2 GiB reserved, ...``."""
    facts = [] if watched.history is None else _facts(watched, watched.history)
    return "; ".join([*(f"{name} {text}" for name, text, _ in facts), *([watched.state] if watched.is_over else [])])


def _facts(watched: RunSnapshot, history: RunHistory) -> Iterator[tuple[str, str, ProgressBar | None]]:
    """Yields name, text and bar of each fact of a run: its steps, memory of each rank, loss, reward and speed."""
    plan, total = watched.plan, history.total_steps
    if total is None:
        yield "step", str(watched.step), None
    else:
        left = "" if watched.seconds_left is None else f", {duration(watched.seconds_left)} left"
        bar = ProgressBar(total=max(total, 1), completed=watched.step, width=BAR_WIDTH)
        yield "step", f"{watched.step:,} of {total:,}{left}", bar
    budget = history.total_bytes if plan is None else plan.estimate.reservable_bytes
    predicted = "" if plan is None else f", predicted {format_bytes(plan.estimate.reserved_bytes)}"
    for number, rank in enumerate(history.ranks):
        reading = next((moment.device for moment in reversed(rank) if moment.device is not None), None)
        if reading is None:
            continue
        peak_bytes = reading.peak_reserved_bytes
        text = f"peak {formatting.of_budget(peak_bytes, budget)} reserved{predicted}"
        if reading.reserved_bytes != peak_bytes:
            text += f"; {format_bytes(reading.reserved_bytes)} now"
        used = None if budget is None else ProgressBar(total=budget, completed=peak_bytes, width=BAR_WIDTH)
        yield "memory" if len(history.ranks) == 1 else f"rank {number}", text, used
    for name, logged in (("loss", ("loss",)), ("reward", REWARD_NAMES)):
        if values := [moment.logs[key] for moment in history.moments for key in logged if key in moment.logs]:
            yield name, f"{values[-1]:#.4g}, from {values[0]:#.4g}", None
    if speeds := [moment.tokens_per_second for moment in history.moments if moment.tokens_per_second]:
        is_known = plan is not None and formatting.has_speed(plan.estimate.time)
        predicted = f", predicted {rate(plan.estimate.time.tokens_per_second)}" if plan is not None and is_known else ""
        yield "speed", f"{rate(speeds[-1])} tokens/s{predicted}", None


def happening_lines(happenings: Iterable[RunMarker]) -> list[str]:
    """Returns a line for each incident; the state already shows starts and ends."""
    return [
        each.text if f"step {each.step}" in each.text else f"step {each.step}  {each.text}"
        for each in happenings
        if each.kind not in ("start", "end")
    ]


def run_outcome(report: Report, ending: str = "finished") -> str:
    """Returns ``finished: 60 steps in 44.5 s, loss 6.34 -> 0.982, peak 88.0 of 99.8 MiB reserved, predicted 90.0 MiB``.
    ``ending``: ``finished`` or ``interrupted``."""
    if not report.has_trained:
        return f"nothing was left to train: the run was finished at step {report.steps}"
    since = f", from step {report.began_at} to {report.steps}" if report.began_at else ""
    facts = [f"{counted(report.steps - report.began_at, 'step')} in {duration(report.seconds)}{since}"]
    for name in ("loss", "reward"):
        first, last = getattr(report, f"first_{name}"), getattr(report, f"last_{name}")
        if first is not None and last is not None:
            facts.append(f"{name} {first:#.4g}" if first == last else f"{name} {first:#.4g} -> {last:#.4g}")
    if report.not_finite_step is not None:
        facts.append(f"loss not a number from step {report.not_finite_step} on: the trained weights are unusable")
    if report.measured is not None:
        peak = formatting.of_budget(report.measured.peak_reserved_bytes, report.budget_bytes)
        facts.append(f"peak {peak} reserved, predicted {format_bytes(report.predicted_peak_reserved_bytes)}")
    return f"{ending}: {', '.join(facts)}"


def assessment(plan: Plan, history: RunHistory) -> tuple[str, ...]:
    """Returns at most three sentences on what went wrong in a run, why, and what to do next; gravest first."""
    told = []
    for kind, advice in _TROUBLES.items():
        texts = [each.text for each in history.happenings if each.kind == kind]
        if texts and (kind != "end" or history.ending == "failed"):
            times = "" if len(texts) == 1 or kind == "end" else f"{len(texts)} times, most recently: "
            told.append(f"{times}{texts[-1]}{advice}")
    speeds = [moment.tokens_per_second for moment in history.moments if moment.tokens_per_second]
    predicted = plan.estimate.time.tokens_per_second if formatting.has_speed(plan.estimate.time) else 0.0
    if speeds and statistics.median(speeds) < SLOW * predicted:
        slow = f"slow: {rate(statistics.median(speeds))} tokens/s, predicted {rate(predicted)}"
        told.append(f"{slow}; if the GPU waits for data, raise --dataloader_num_workers")
    if history.ending in ("", "interrupted"):
        told[2:] = ["the same command with --resume_from_checkpoint continues from the last checkpoint"]
    return tuple(f"{each[:1].upper()}{each[1:]}" for each in told[:3])


def report_view(report: Report, page: str | None = None) -> RenderableType:
    """Shows a finished run, the error of its prediction, the path of its HTML ``page``, and at last what came of it."""
    grid = table("", "", show_header=False)
    outcome = Text(run_outcome(report), style="bold" if report.not_finite_step is None else BAD)
    if not report.has_trained:
        add(grid, "output folder", report.output_dir)
        return Indented(Group(Indented(grid, 2), outcome))
    steps = report.steps - report.began_at
    add(grid, "trained", formatting.trains(report.knobs, report.trained))
    learned = formatting.schedule(report.knobs, report.schedule, steps=steps, step_tokens=report.step_tokens)
    add(grid, "schedule", learned)
    allocated = f"{format_bytes(report.predicted_peak_bytes)} allocated predicted, not measured here"
    if report.measured is not None:
        allocated = _peaks(
            "allocated", report.predicted_peak_bytes, report.measured.peak_allocated_bytes, report.prediction_error
        )
        if (report.prediction_error or 0.0) > SHORT_RUN_ERROR:
            why = "the prediction is for the longest row, which this run may not have drawn"
            if report.incidents:
                why = "the prediction is for whole micro-batches, and some were split"
            elif report.longest_rows_first:
                why = "the prediction is too high: the longest rows, which ran first, needed less"
            allocated += f" ({why})"
    add(grid, "peak", allocated)
    if report.measured is not None:
        predicted, measured = report.predicted_peak_reserved_bytes, report.measured.peak_reserved_bytes
        add(grid, "", _peaks("reserved", predicted, measured, report.reserved_prediction_error))
        if retries := report.measured.num_alloc_retries:
            stops = "the allocator freed its cache and retried, which stalls the GPU: more --headroom avoids that"
            add(grid, "retries", f"{counted(retries, 'time')} {stops}")
    survived = ((report.incidents, "out-of-memory error"), (report.restarts, "restart"))
    if any(number for number, _ in survived):
        add(grid, "survived", ", ".join(counted(number, noun) for number, noun in survived if number))
    add(grid, "output folder", report.output_dir)
    if page is not None:
        add(grid, "report", f"{page} (open it in a browser)")
    return Indented(Group(Indented(grid, 2), outcome))


def _peaks(kind: str, predicted_bytes: int, measured_bytes: int, error: float | None) -> str:
    """Returns ``7.42 GiB allocated predicted, 7.40 GiB measured: error +0.2 %``."""
    sentence = f"{format_bytes(predicted_bytes)} {kind} predicted, {format_bytes(measured_bytes)} measured"
    return sentence if error is None else f"{sentence}: error {100 * error:+.1f} %"
