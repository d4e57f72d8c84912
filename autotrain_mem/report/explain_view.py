"""Explains a plan from its file alone: where the memory goes, what was tried, and the alternatives."""

from dataclasses import fields

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import formatting, plan_view
from autotrain_mem.report.estimate_view import memory_blocks, not_counted
from autotrain_mem.report.layout import BAD, GOOD, LOUD, QUIET, Indented, add, scale_for, section, table
from autotrain_mem.support.units import counted, rate
from autotrain_mem.types import Knobs, Plan


def explain_view(plan: Plan) -> RenderableType:
    """Shows everything that a plan file holds, the verdict first."""
    estimate = plan.estimate
    grid = table("", "", show_header=False)
    for fact in plan_view.facts(plan):
        add(grid, Text(fact.label, style=LOUD if fact.label in plan_view.NOTES else ""), fact.text)
    if estimate.hardware.source:
        add(grid, "card", estimate.hardware.source)
    tried: list[RenderableType] = [Text(), Text("nothing else was tried")]
    if plan.attempts:
        units, lines, legend = attempts(plan)
        tried = section(f"tried; {units}", lines, *(f"{sign:14}{words}" for sign, words in legend), indent=0)
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
    how = "" if layers is None else f"; the plan itself was rehearsed on copies of at most {counted(layers, 'layer')}"
    return Indented(Group(*parts, Text(), Text(f"{plan_view.searched(plan)}{how}", style=QUIET)))


def attempts(plan: Plan) -> tuple[str, Table, list[tuple[str, str]]]:
    """Returns the unit and budget, a table of the rehearsed points as they differ from the first, and a legend."""
    scale = scale_for(max(plan.estimate.budget_bytes, *(attempt.required_bytes for attempt in plan.attempts), 0))
    # The chosen point may appear twice: rehearsed on few layers first, and on the whole model last.
    chosen = max((at for at, each in enumerate(plan.attempts) if each.knobs == plan.knobs), default=None)
    copies = [attempt.rehearsed_layers for attempt in plan.attempts]
    asked = formatting.asked_for(plan.job, plan.defaults, plan.attempts)
    speeds = any(attempt.tokens_per_second for attempt in plan.attempts)
    grid = table("", "batch", "settings", "needs", "tokens/s" if speeds else "fits", right=(0, 3, 4))
    for index, attempt in enumerate(plan.attempts):
        fits = Text(rate(attempt.tokens_per_second) if attempt.tokens_per_second else "yes")
        # The speed of what does not fit is meaningless.
        outcome = fits if attempt.fits else Text("too much" if speeds else "no", style=BAD)
        add(
            grid,
            Text(f">{index + 1}", style=GOOD) if index == chosen else str(index + 1),
            formatting.batch(attempt.knobs),
            formatting.attempt(attempt, asked, has_copies=any(copies)),
            scale.size(attempt.required_bytes),
            outcome,
            style="bold" if index == chosen else "",
        )
    legend = [] if chosen is None else [(">", "chosen")]
    if plan.attempts:
        names = [field.name for field in fields(Knobs) if field.name not in {*formatting.BATCHES, "sharding"}]
        legend.append(("as asked for", formatting.settings(asked, names)))
        if all(copies):
            legend.append(("", "all on copies with fewer layers, extrapolated to the full depth"))
    return f"needs are in {scale.unit}, the budget is {scale.size(plan.estimate.budget_bytes)}", grid, legend
