"""Explains a plan from its file alone: where the memory goes, what was tried, and what else there was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import formatting, plan_view
from autotrain_mem.report.estimate_view import memory_blocks, not_counted
from autotrain_mem.report.layout import BAD, GOOD, LOUD, QUIET, Indented, Scale, add, scale_for, section, table
from autotrain_mem.support.units import counted, rate
from autotrain_mem.types import Knobs, Plan

CHOSEN = ">"


def explain_view(plan: Plan) -> RenderableType:
    """Shows everything that a plan file knows, the answers first."""
    estimate = plan.estimate
    grid = table("", "", show_header=False)
    for fact in plan_view.facts(plan):
        add(grid, Text(fact.label, style=LOUD if fact.label in plan_view.NOTES else ""), fact.text)
    if estimate.hardware.source:
        add(grid, "card", estimate.hardware.source)
    tried: list[RenderableType] = [Text(), Text("nothing else was tried")]
    if plan.attempts:
        legend = (f"{sign:14}{meaning}" for sign, meaning in attempts_legend(plan))
        tried = section(f"tried; {attempts_units(plan)}", attempts_table(plan), *legend, indent=0)
    parts: list[RenderableType] = [
        Text(f"autofit {plan.method} --model {plan.model}", style="bold"),
        *plan_view.decision(plan),
        Indented(grid, 2),
        *section("settings", plan_view.settings_table(plan)),
        *memory_blocks(estimate),
        *tried,
        *plan_view.changes(plan),
        *plan_view.elsewhere(plan),
        *plan_view.proposed(plan),
        *plan_view.flags(plan),
        *not_counted(estimate),
    ]
    layers = estimate.memory.rehearsed_layers
    how = "" if layers is None else f", the plan itself on copies of {counted(layers, 'layer')} at most"
    return Indented(Group(*parts, Text(), Text(f"{plan_view.searched(plan)}{how}", style=QUIET)))


def attempts_units(plan: Plan) -> str:
    """``needs are in GiB, the budget is 11.17``."""
    scale = _scale(plan)
    return f"needs are in {scale.unit}, the budget is {scale.size(plan.estimate.budget_bytes)}"


def _scale(plan: Plan) -> Scale:
    return scale_for(max(plan.estimate.budget_bytes, *(attempt.required_bytes for attempt in plan.attempts), 0))


def attempts_table(plan: Plan) -> Table:
    """Returns a line for each point that the search rehearsed, with how it differs from the first."""
    # What was chosen may have been rehearsed on few layers first, and on the whole model last.
    chosen = max((at for at, each in enumerate(plan.attempts) if each.knobs == plan.knobs), default=None)
    scale, width = _scale(plan), len(str(len(plan.attempts)))
    has_copies = any(attempt.rehearsed_layers for attempt in plan.attempts)
    speeds = any(attempt.tokens_per_second for attempt in plan.attempts)
    grid = table("", "batch", "settings", "needs", "tokens/s" if speeds else "fits", right=(0, 3, 4))
    for index, attempt in enumerate(plan.attempts):
        is_chosen = index == chosen
        if attempt.fits:  # the speed of what does not fit is meaningless
            outcome = Text(rate(attempt.tokens_per_second) if attempt.tokens_per_second else "yes")
        else:
            outcome = Text("too much" if speeds else "no", style=BAD)
        add(
            grid,
            Text(f"{CHOSEN if is_chosen else ''}{index + 1:>{width}}", style=GOOD if is_chosen else ""),
            formatting.batch(attempt.knobs),
            formatting.attempt(attempt, plan.attempts[0].knobs, has_copies=has_copies),
            scale.size(attempt.required_bytes),
            outcome,
            style="bold" if is_chosen else "",
        )
    return grid


def attempts_legend(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields the signs of the table, each with its meaning."""
    if any(each.knobs == plan.knobs for each in plan.attempts):
        yield CHOSEN, "chosen"
    beside = {*formatting.BATCHES, "sharding"}
    names = [field.name for field in fields(Knobs) if field.name not in beside]
    yield "as asked for", formatting.settings(plan.attempts[0].knobs, names)
    if all(each.rehearsed_layers for each in plan.attempts):
        yield "", "all of them on copies of fewer layers, expanded to the whole depth"
