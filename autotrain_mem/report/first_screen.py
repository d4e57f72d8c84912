"""Shows a plan on one screen, in terminals and notebooks: whether it fits, what is trained, and what it costs."""

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.comparison_view import cards_view
from autotrain_mem.report.estimate_view import sum_table, verdict, why_not
from autotrain_mem.report.layout import QUIET, Indented
from autotrain_mem.report.plan_view import NOTES, Fact, decision, facts, searched
from autotrain_mem.report.run_view import report_view
from autotrain_mem.report.terminal import Console
from autotrain_mem.types import Cards, Estimate, Harm, Plan, Report

LINES = 24
"""Lines of a default terminal window."""
COLUMNS = 80
LABEL_COLUMNS = 12
LONGEST_COMMAND = 3 * (COLUMNS - LABEL_COLUMNS)
"""Characters of the longest command that is shown."""
_COSTS = {
    **{Harm.NONE: "nothing", Harm.TIME: "time", Harm.ROUNDING: "rounding"},
    **{Harm.WHAT_IS_TRAINED: "training", Harm.DATA: "data"},
}
"""Harm of a change -> its cost in one word."""
_REST = "all details: -v, or autofit explain"


def first_screen(plan: Plan, next_command: str | None = None) -> RenderableType:
    """Shows a plan in a terminal's window, of at least :data:`LINES` lines and :data:`COLUMNS` columns.
    ``next_command`` is the command that trains with the plan; None if training follows at once."""
    lines, known = decision(plan), [fact for fact in facts(plan) if fact.gravity]
    asked = len(lines) - len(plan.questions)
    head = [Fact("", line, 90 if number < asked else 80) for number, line in enumerate(lines)]
    head += [_BLANK, *(replace(fact, label=f"  {fact.label}") for fact in known if fact.label not in NOTES)]
    tail = [fact for fact in known if fact.label in NOTES]
    tail = [*([_BLANK] if tail else []), *tail, _BLANK]
    if next_command is not None:
        short = next_command if len(next_command) <= LONGEST_COMMAND else "the same command without the word plan"
        tail.append(Fact("train", Text(short, style="bold"), ALWAYS))
    tail.append(Fact("", Text(f"{searched(plan)}; {_REST}", style=QUIET), ALWAYS))
    changed = list[Fact]()
    for lever in sorted(plan.levers, key=lambda each: -each.harm):  # what it costs, its old and new value, and why
        moved = f"{lever.name} {formatting.value(lever.before)} -> {formatting.value(lever.after)}"
        text = Text.assemble((moved, "bold"), f": {lever.why}")
        changed.append(Fact(f"  {_COSTS[lever.harm]}", text, 10 + lever.harm))
    heading = [_BLANK, Fact("", Text("changed, and what it costs", style="bold"), 70)] if changed else []
    room = LINES - len(head) - len(heading) - len(tail)
    if len(changed) > room:
        left = len(changed) - max(0, room - 1)
        changed = [*changed[: max(0, room - 1)], Fact("", Text(f"  and {left} more, which -v shows", style=QUIET))]
    return _Screen([*head, *heading, *changed, *tail])


def estimate_screen(estimate: Estimate) -> RenderableType:
    """Shows an estimate on one screen: the verdict, the settings, and a table of bytes that add up to the need."""
    rest = Text("kinds of segments, phases, modules and what is not counted: -v", style=QUIET)
    reason = why_not(estimate)
    return _Screen(
        [
            Fact("", verdict(estimate), 90),
            *([Fact("", Text(reason), 80)] if reason else []),
            *([Fact("  base", Text(estimate.unquantized), 60)] if estimate.unquantized else []),
            Fact("  settings", Text(formatting.settings(estimate.knobs)), 50),
            Fact("  trains", Text(formatting.trains(estimate.knobs, estimate.memory.trained)), 40),
            Fact("  speed", Text(formatting.speed(estimate.time)), 30),
            _BLANK,
            sum_table(estimate),
            _BLANK,
            Fact("", rest, ALWAYS),
        ]
    )


ALWAYS = 100
_BLANK = Fact("", Text())


@dataclass(frozen=True, slots=True)
class _Screen:
    """Fits parts to a terminal's window: one line of each, then in full as many as fit, gravest first. Tables are never
    cut, and nothing is in a pipe or a notebook."""

    parts: Sequence[Fact | Table]

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        def lines(part: RenderableType) -> int:
            return len(console.render_lines(part, options, pad=False))

        gravities = [ALWAYS if isinstance(part, Table) else part.gravity for part in self.parts]
        order = sorted(range(len(gravities)), key=lambda at: -gravities[at])
        left = max(LINES, console.height) if console.is_terminal else sys.maxsize
        shown = dict[int, RenderableType]()
        for at in order:
            part = _shown(self.parts[at], whole=gravities[at] == ALWAYS)
            if lines(part) <= left:
                shown[at], left = part, left - lines(part)
        for at in filter(shown.__contains__, order):
            whole = _shown(self.parts[at], whole=True)
            if (more := lines(whole) - lines(shown[at])) <= left:
                shown[at], left = whole, left - more
        yield from (Indented(shown[at]) for at in sorted(shown))


def _shown(fact: Fact | Table, *, whole: bool) -> RenderableType:
    if isinstance(fact, Table):
        return fact
    text = fact.text.copy()
    if not whole:
        text.no_wrap, text.overflow = True, "ellipsis"
    if not fact.label:
        return text
    grid = Table.grid(padding=0, expand=True)
    grid.add_column(width=LABEL_COLUMNS, no_wrap=True)
    grid.add_column(overflow="fold" if whole else "ellipsis", no_wrap=not whole, ratio=1)
    grid.add_row(Text(fact.label, style=QUIET), text)
    return grid


_PAGE = '<pre style="white-space: pre; overflow-x: auto; line-height: 1.3">{code}</pre>'

Shown = Plan | Estimate | Report | Cards


def html_of(shown: Shown) -> str:
    """Renders the terminal's view for ``_repr_html_``, with every text escaped."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor", force_jupyter=False)
    views: dict[type, Any] = {Plan: first_screen, Estimate: estimate_screen, Report: report_view, Cards: cards_view}
    console.print(views[type(shown)](shown))
    return console.export_html(inline_styles=True, theme=DEFAULT_TERMINAL_THEME, code_format=_PAGE)
