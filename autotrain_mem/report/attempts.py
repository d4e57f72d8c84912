"""Shows what the search rehearsed, one line each, in the order in which it was tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import BAD, GOOD, Scale, add, scale_for, section, table
from autotrain_mem.settings.levers import EXPANDABLE
from autotrain_mem.settings.words import CHECKPOINTING
from autotrain_mem.support.units import counted, rate
from autotrain_mem.types import Candidate, Knobs, Plan

CHOSEN = ">"


class _Mark(NamedTuple):
    """A sign beside the batch, for what attempts differ in."""

    knob: str
    """Empty for what was rehearsed."""
    sign: str
    has: Callable[[Candidate], bool]
    meaning: str


def attempts_view(plan: Plan) -> list[RenderableType]:
    """The table, and what its signs mean."""
    if not plan.attempts:
        return [Text(), Text("nothing else was tried")]
    scale = _scale(plan)
    heading = f"tried; needs are in {scale.unit}, the budget is {scale.size(plan.estimate.budget_bytes)}"
    legend = (f"{sign:14}{meaning}" for sign, meaning in attempts_legend(plan))
    return section(heading, attempts_table(plan), *legend, indent=0)


def _scale(plan: Plan) -> Scale:
    return scale_for(max(plan.estimate.budget_bytes, *(attempt.required_bytes for attempt in plan.attempts), 0))


def attempts_table(plan: Plan) -> Table:
    """One line for each point that the search rehearsed, with what it has that the first had not."""
    # The last rehearsal of what was chosen is the one of the whole model, where it was one of few layers before.
    chosen = max((at for at, each in enumerate(plan.attempts) if each.knobs == plan.knobs), default=None)
    scale, marks, width = _scale(plan), [*_marks(plan)], len(str(len(plan.attempts)))
    speeds = any(attempt.tokens_per_second for attempt in plan.attempts)
    grid = table("", "batch", "settings", "needs", "tokens/s" if speeds else "fits", right=(0, 3, 4))
    for index, attempt in enumerate(plan.attempts):
        is_chosen = index == chosen
        signs = "".join(mark.sign for mark in marks if mark.has(attempt))
        if attempt.fits:  # the speed of what does not fit is nobody's
            outcome = Text(rate(attempt.tokens_per_second) if attempt.tokens_per_second else "yes")
        else:
            outcome = Text("too much" if speeds else "no", style=BAD)
        add(
            grid,
            Text(f"{CHOSEN if is_chosen else ''}{index + 1:>{width}}", style=GOOD if is_chosen else ""),
            f"{formatting.batch(attempt.knobs)} {signs}".rstrip(),
            formatting.difference(attempt.knobs, plan.attempts[0].knobs),
            scale.size(attempt.required_bytes),
            outcome,
            style="bold" if is_chosen else "",
        )
    return grid


def attempts_legend(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields the signs of the table, each with its meaning."""
    marks = [*_marks(plan)]
    if any(each.knobs == plan.knobs for each in plan.attempts):
        yield CHOSEN, "chosen"
    varying = {*formatting.BATCHES, *(mark.knob for mark in marks), "sharding"}
    shared = [field.name for field in fields(Knobs) if field.name not in varying]
    yield "as asked for", formatting.settings(plan.attempts[0].knobs, shared)
    yield from ((mark.sign, mark.meaning) for mark in marks)
    if all(each.rehearsed_layers for each in plan.attempts):
        yield "", "all of them on copies of fewer layers, expanded to the whole depth"


def _marks(plan: Plan) -> Iterator[_Mark]:
    tried = plan.attempts
    if len({each.knobs.recomputes for each in tried}) > 1:
        yield _Mark(CHECKPOINTING, "*", lambda each: not each.knobs.recomputes, "without gradient checkpointing")
    differ = len({each.knobs.expandable_segments for each in tried}) > 1
    if differ or any(lever.name == EXPANDABLE for lever in plan.levers):  # else every one is as the user said
        meaning = f"with {formatting.segments(expandable=True)}"
        yield _Mark(EXPANDABLE, "+", lambda each: each.knobs.expandable_segments, meaning)
    layers = {each.rehearsed_layers for each in tried}
    if len(layers) > 1 and None in layers:
        few = counted(max(filter(None, layers)), "layer")
        meaning = f"rehearsed on the whole model, the others on copies of {few}"
        yield _Mark("", "w", lambda each: each.rehearsed_layers is None, meaning)
