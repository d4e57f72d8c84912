"""A plan's first screen: 24 lines that say whether it fits, what is trained, how fast, and what was given up and why.

All else that a plan holds is shown by ``plan_view`` and ``explain_view``. A notebook shows the same.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from autotrain_mem.types import Estimate, Harm, Plan, Report
from autotrain_mem.types.gpu_comparison import Cards

LINES = 24
"""Of a terminal as it opens."""
COLUMNS = 80
LABEL_COLUMNS = 12
LONGEST_COMMAND = 3 * (COLUMNS - LABEL_COLUMNS)
"""Characters of a command that is shown."""
_COSTS = {
    **{Harm.NONE: "nothing", Harm.TIME: "time", Harm.ROUNDING: "rounding"},
    **{Harm.WHAT_IS_TRAINED: "training", Harm.DATA: "data"},
}
"""What a change costs, in a word."""
_REST = "settings, attempts, other levels: -v, or autofit explain"


def first_screen(plan: Plan, next_command: str | None = None) -> RenderableType:
    """Shows a plan in at most :data:`LINES` lines where these are :data:`COLUMNS` columns wide, or wider.

    Args:
        next_command: What trains with the plan; None where that is about to happen.
    """
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
    for lever in sorted(plan.levers, key=lambda each: -each.harm):  # what it costs, was and is, and why
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
    """Shows an estimate in about as many lines: the verdict, the settings, and the column that adds up to the need."""
    rest = Text("kinds of segments, hours, phases, modules and what is not counted: -v", style=QUIET)
    above = [
        Fact("", verdict(estimate), 90),
        *([Fact("", Text(reason), 80)] if (reason := why_not(estimate)) else []),
        Fact("  settings", Text(formatting.settings(estimate.knobs)), 50),
        Fact("  trains", Text(formatting.trains(estimate.knobs, estimate.memory.trained)), 40),
        Fact("  speed", Text(formatting.speed(estimate.time)), 30),
        _BLANK,
    ]
    return _Screen(above, sum_table(estimate), [_BLANK, Fact("", rest, ALWAYS)])


ALWAYS = 100
_BLANK = Fact("", Text())


@dataclass(frozen=True, slots=True)
class _Screen:
    """Measures its facts on the console that shows them, and shows whole what there is room for."""

    above: Sequence[Fact]
    """What stands above ``fixed``."""
    fixed: RenderableType | None = None
    """Is always shown as it is."""
    below: Sequence[Fact] = ()

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        def lines(part: RenderableType) -> int:
            return len(console.render_lines(part, options, pad=False))

        facts = [*self.above, *self.below]
        order = sorted(range(len(facts)), key=lambda at: -facts[at].gravity)
        left = LINES if self.fixed is None else LINES - lines(self.fixed)
        shown = dict[int, RenderableType]()
        for at in order:  # a line of each, as far as they go; what is always shown is so whole
            part = _shown(facts[at], whole=facts[at].gravity == ALWAYS)
            if lines(part) <= left:
                shown[at], left = part, left - lines(part)
        for at in filter(shown.__contains__, order):  # the gravest whole, as far as they go
            whole = _shown(facts[at], whole=True)
            if (more := lines(whole) - lines(shown[at])) <= left:
                shown[at], left = whole, left - more
        yield from (Indented(shown[at]) for at in range(len(self.above)) if at in shown)
        yield from [] if self.fixed is None else [Indented(self.fixed)]
        yield from (Indented(shown[at]) for at in range(len(self.above), len(facts)) if at in shown)


def _shown(fact: Fact, *, whole: bool) -> RenderableType:
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


NOTEBOOK_COLUMNS = 100
_PAGE = '<pre style="white-space: pre; overflow-x: auto; line-height: 1.3">{code}</pre>'

Shown = Plan | Estimate | Report | Cards


def html_of(shown: Shown) -> str:
    """Renders what ``_repr_html_`` gives: the terminal's view, every text escaped."""
    console = Console(record=True, width=NOTEBOOK_COLUMNS, file=io.StringIO(), force_terminal=True, force_jupyter=False)
    match shown:
        case Plan():
            console.print(first_screen(shown))
        case Estimate():
            console.print(estimate_screen(shown))
        case Report():
            console.print(report_view(shown))
        case Cards():
            console.print(cards_view(shown))
    return console.export_html(inline_styles=True, theme=DEFAULT_TERMINAL_THEME, code_format=_PAGE)
