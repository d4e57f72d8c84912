"""A plan's first screen: 24 lines that say whether it fits, what is trained, how fast, and what was given up and why.

All else that a plan holds is shown by ``plan_view`` and ``explain_view``. A notebook shows the same.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import rich.console
from rich.console import ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.comparison_view import cards_view
from autotrain_mem.report.estimate_view import sum_table, verdict, why_not
from autotrain_mem.report.layout import QUIET, Indented
from autotrain_mem.report.plan_view import data, decision, searched, short_facts, vllm_server, vllm_share
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


@dataclass(frozen=True, slots=True)
class _Part:
    """One thing that is said: cut to a line, or whole where there is room."""

    text: Text = field(default_factory=Text)
    label: str = ""
    gravity: int = 0
    """The gravest are the first to be shown whole, and the last to be left out."""
    whole: bool = False

    def shown(self) -> RenderableType:
        text = self.text.copy()
        if not self.whole:
            text.no_wrap, text.overflow = True, "ellipsis"
        if not self.label:
            return text
        grid = Table.grid(padding=0, expand=True)
        grid.add_column(width=LABEL_COLUMNS, no_wrap=True)
        grid.add_column(overflow="fold" if self.whole else "ellipsis", no_wrap=not self.whole, ratio=1)
        grid.add_row(Text(self.label, style=QUIET), text)
        return Indented(grid)


def first_screen(plan: Plan, next_command: str | None = None) -> RenderableType:
    """Shows a plan in at most :data:`LINES` lines where these are :data:`COLUMNS` columns wide, or wider.

    Args:
        next_command: What trains with the plan; None where that is about to happen.
    """
    head, tail, levers = [*_head(plan)], [*_tail(plan, next_command)], list[_Part]()
    for lever in sorted(plan.levers, key=lambda each: -each.harm):  # what it costs, was and is, and why
        moved = f"{lever.name} {formatting.value(lever.before)} -> {formatting.value(lever.after)}"
        text = Text.assemble((moved, "bold"), f": {lever.why}")
        levers.append(_Part(text, f"  {_COSTS[lever.harm]}", 10 + lever.harm))
    heading = [_Part(), _Part(Text("changed, and what it costs", style="bold"), gravity=70)] if levers else []
    room = LINES - len(head) - len(heading) - len(tail)
    if len(levers) > room:
        left = len(levers) - max(0, room - 1)
        levers = [*levers[: max(0, room - 1)], _Part(Text(f"  and {left} more, which -v shows", style=QUIET))]
    return _Screen([*head, *heading, *levers, *tail])


def estimate_screen(estimate: Estimate) -> RenderableType:
    """Shows an estimate in about as many lines: the verdict, the settings, and the column that adds up to the need."""
    memory = estimate.memory
    parts = [
        _Part(verdict(estimate), gravity=90),
        *(_Part(Text(sentence), gravity=80) for sentence in why_not(estimate)),
        _Part(Text(formatting.settings(estimate.knobs)), "  settings", 50),
        _Part(Text(formatting.trains(estimate.knobs, memory.trained)), "  trains", 40),
        _Part(Text(formatting.speed(estimate.time)), "  speed", 30),
        _Part(),
    ]
    rest = Text("kinds of segments, hours, phases, modules and what is not counted: -v", style=QUIET)
    return _Screen(parts, sum_table(estimate), [_Part(), _Part(rest)])


@dataclass(frozen=True, slots=True)
class _Screen:
    """Measures its parts on the console that shows them, and shows whole what there is room for."""

    above: Sequence[_Part]
    """What stands above ``fixed``."""
    fixed: RenderableType | None = None
    """Is always shown as it is."""
    below: Sequence[_Part] = ()

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        def lines(part: RenderableType) -> int:
            return len(console.render_lines(part, options, pad=False))

        room = LINES if self.fixed is None else LINES - lines(self.fixed)
        wrapped = sum(lines(part.shown()) - 1 for part in (*self.above, *self.below))
        parts = _least([*self.above, *self.below], room - wrapped)
        left = room - sum(lines(part.shown()) for part in parts)
        for at in sorted(range(len(parts)), key=lambda at: -parts[at].gravity):  # the gravest whole, as far as they can
            whole = replace(parts[at], whole=True)
            more = lines(whole.shown()) - lines(parts[at].shown())
            if more <= left:
                parts[at], left = whole, left - more
        shown = [Indented(part.shown()) for part in parts]
        fixed = [] if self.fixed is None else [Indented(self.fixed)]
        count = len(shown) - len(self.below)
        yield from (*shown[:count], *fixed, *shown[count:])


def _least(parts: list[_Part], room: int) -> list[_Part]:
    """Leaves out the least grave parts where even a line for each is too many; the last says where to find them."""
    if len(parts) <= room:
        return parts
    *others, last = parts
    kept = sorted(sorted(range(len(others)), key=lambda at: -others[at].gravity)[: max(0, room - 1)])
    return [*(others[at] for at in kept), last]


_GRAVITY = {"most": 70, "trains": 60, "experts": 50, "speed": 60, "cost": 50, "batch": 40, "GPUs": 40}
"""Facts that are shown -> how grave they are."""


def _head(plan: Plan) -> Iterator[_Part]:
    """Says whether it fits, what a user must not overlook, and what is trained and how fast."""
    lines = decision(plan)
    for number, line in enumerate(lines):
        yield _Part(line, gravity=90 if number < len(lines) - len(plan.questions) else 80)
    yield _Part()
    means = formatting.LEVELS.get(plan.level)
    yield _Part(Text(f"{plan.level}: {means}" if means else plan.level), "  level", 50)
    for label, fact in short_facts(plan):
        if label in _GRAVITY:
            yield _Part(fact, f"  {label}", _GRAVITY[label])
    for number, line in enumerate(data(plan).split("\n")):
        yield _Part(line, "  " if number else "  data", 60 - number)
    for number, sentence in enumerate(vllm_share(plan.estimate)):
        yield _Part(Text(sentence), "  " if number else "  vLLM", 40 - number)
    for number, sentence in enumerate(vllm_server(plan)):
        yield _Part(Text(sentence), "  " if number else "  vLLM", 60)


def _tail(plan: Plan, next_command: str | None) -> Iterator[_Part]:
    """Says what was found wrong, what would be worth more, and what trains with the plan."""
    notes = [(Text(warning), "warning", 75) for warning in plan.warnings]
    notes += [(Text(f"{each.flags}: {each.why}"), "advice", 30) for each in plan.advice]
    yield from [_Part()] if notes else []
    yield from (_Part(*note) for note in notes)
    yield _Part()
    if next_command is not None:
        short = next_command if len(next_command) <= LONGEST_COMMAND else "the same command without the word plan"
        yield _Part(Text(short, style="bold"), "train", 100, whole=True)
    yield _Part(Text(f"{searched(plan)}; {_REST}", style=QUIET), gravity=5)


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
