"""A plan's first screen: 24 lines that say whether it fits, what is trained, how fast, and what was given up and why.

All else that a plan holds is shown by ``plan_view`` and ``explain_view``. A notebook shows the same.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import rich.console
from rich.console import ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.comparison_view import cards_view
from autotrain_mem.report.estimate_view import sum_of, sum_table, verdict, why_not
from autotrain_mem.report.layout import LOUD, QUIET, Block
from autotrain_mem.report.plan_view import cost, data, loud, most_sentence, searched, speed, vllm_server, vllm_share
from autotrain_mem.report.run_view import report_view
from autotrain_mem.report.terminal import Console
from autotrain_mem.support.units import counted
from autotrain_mem.types import Estimate, Harm, Plan, Report
from autotrain_mem.types.gpu_comparison import Cards

LINES = 24
"""Of a terminal as it opens."""
COLUMNS = 80
LABEL_COLUMNS = 12
LONGEST_COMMAND = 3 * (COLUMNS - LABEL_COLUMNS)
"""Characters of a command that is shown."""
_COSTS = {
    Harm.NONE: "nothing",
    Harm.TIME: "time",
    Harm.ROUNDING: "rounding",
    Harm.WHAT_IS_TRAINED: "training",
    Harm.DATA: "data",
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
        return Block(grid)


def first_screen(plan: Plan, next_command: str | None = None) -> RenderableType:
    """Shows a plan in at most :data:`LINES` lines where these are :data:`COLUMNS` columns wide, or wider.

    Args:
        next_command: What trains with the plan; None where that is about to happen.
    """
    head, levers = [*_head(plan), *_facts(plan)], [*_levers(plan)]
    tail = [*_notes(plan), *_tail(plan, next_command)]
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
    return _Screen(parts, sum_table(estimate, sum_of(estimate)), [_Part(), _Part(rest)])


class _Screen:
    """Measures its parts on the console that shows them, and shows whole what there is room for.

    Args:
        above: What stands above ``fixed``.
        fixed: Is always shown as it is.
        below: What stands below it.
    """

    def __init__(
        self, above: Sequence[_Part], fixed: RenderableType | None = None, below: Sequence[_Part] = ()
    ) -> None:
        self._above = above
        self._fixed = fixed
        self._below = below

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        def lines(part: RenderableType) -> int:
            return len(console.render_lines(part, options, pad=False))

        room = LINES if self._fixed is None else LINES - lines(self._fixed)
        wrapped = sum(lines(part.shown()) - 1 for part in (*self._above, *self._below))
        parts = _least([*self._above, *self._below], room - wrapped)
        left = room - sum(lines(part.shown()) for part in parts)
        shown = _lengthened(parts, left, lambda part: lines(part.shown()))
        count = len(shown) - len(self._below) if self._fixed is not None else len(shown)
        for part in shown[:count]:
            yield Block(part.shown())
        if self._fixed is not None:
            yield Block(self._fixed)
        for part in shown[count:]:
            yield Block(part.shown())


def _least(parts: list[_Part], room: int) -> list[_Part]:
    """Leaves out the least grave parts where even a line for each is too many; the last says where to find them."""
    if len(parts) <= room:
        return parts
    *others, last = parts
    kept = sorted(sorted(range(len(others)), key=lambda at: -others[at].gravity)[: max(0, room - 1)])
    return [*(others[at] for at in kept), last]


def _lengthened(parts: Sequence[_Part], room: int, lines: Callable[[_Part], int]) -> list[_Part]:
    """Shows the gravest parts whole, as far as there is room."""
    chosen = list(parts)
    for at in sorted(range(len(chosen)), key=lambda at: -chosen[at].gravity):
        whole = replace(chosen[at], whole=True)
        more = lines(whole) - lines(chosen[at])
        if more <= room:
            chosen[at], room = whole, room - more
    return chosen


def _head(plan: Plan) -> Iterator[_Part]:
    """Says whether it fits, and what a user must not overlook."""
    changed = f" with {counted(len(plan.levers), 'change')}" if plan.levers else " as asked for"
    yield _Part(verdict(plan.estimate, changed), gravity=90)
    for sentence in filter(None, map(loud, plan.levers)):
        yield _Part(Text(sentence, style=LOUD), gravity=90)
    for each in plan.questions:
        yield _Part(Text(f"a question: {each.why}; {each.flags} takes it", style=LOUD), gravity=80)
    yield _Part()


def _facts(plan: Plan) -> Iterator[_Part]:
    estimate, knobs = plan.estimate, plan.knobs
    means = formatting.LEVELS.get(plan.level)
    yield _Part(Text(f"{plan.level}: {means}" if means else plan.level), "  level", 50)
    if plan.most is not None:
        yield _Part(Text(most_sentence(plan.most, estimate.budget_bytes, plan.level)), "  most", 70)
    parameters = plan.job.arguments.get("lora_target_parameters")
    yield _Part(Text(formatting.trains(knobs, estimate.memory.trained, parameters)), "  trains", 60)
    if estimate.routed:
        yield _Part(Text(estimate.routed), "  experts", 50)
    yield _Part(speed(plan), "  speed", 60)
    if plan.price is not None and plan.cost is not None:
        yield _Part(Text(cost(plan.cost, plan.price)), "  cost", 50)
    device = "CPU" if estimate.hardware.origin == "cpu" else "GPU"
    count = f"{device}s" if knobs.processes > 1 else f"x 1 {device}"
    count = f"groups of {knobs.token_shards} {device}s" if knobs.token_shards > 1 else count
    noun = plan.job.method_facts.row_noun
    batch = f"{knobs.effective_batch_size} = {formatting.batch(knobs)} {count}"
    yield _Part(Text(f"{batch}  ({noun} at once x accumulation x devices)"), "  batch", 40)
    if knobs.processes > 1:
        yield _Part(Text(formatting.devices(knobs)), "  GPUs", 40)
    for number, line in enumerate(data(plan).split("\n")):
        yield _Part(line, "  " if number else "  data", 60 - number)
    for number, sentence in enumerate(vllm_share(estimate)):
        yield _Part(Text(sentence), "  " if number else "  vLLM", 40 - number)
    for number, sentence in enumerate(vllm_server(plan)):
        yield _Part(Text(sentence), "  " if number else "  vLLM", 60)


def _levers(plan: Plan) -> Iterator[_Part]:
    """Lists what was changed, the gravest first: what that costs, what it was, what it is, and why."""
    for lever in sorted(plan.levers, key=lambda each: -each.harm):
        moved = f"{lever.name} {formatting.value(lever.before)} -> {formatting.value(lever.after)}"
        yield _Part(Text.assemble((moved, "bold"), f": {lever.why}"), f"  {_COSTS[lever.harm]}", 10 + lever.harm)


def _notes(plan: Plan) -> Iterator[_Part]:
    """Says what was found wrong, and what would be worth more."""
    notes = [("warning", warning) for warning in plan.warnings]
    notes += [("advice", f"{each.flags}: {each.why}") for each in plan.advice]
    if notes:
        yield _Part()
    for label, sentence in notes:
        yield _Part(Text(sentence), label, 75 if label == "warning" else 30)


def _tail(plan: Plan, next_command: str | None) -> Iterator[_Part]:
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
    console.print(_view(shown))
    return console.export_html(inline_styles=True, theme=DEFAULT_TERMINAL_THEME, code_format=_PAGE)


def _view(shown: Shown) -> RenderableType:
    match shown:
        case Plan():
            return first_screen(shown)
        case Estimate():
            return estimate_screen(shown)
        case Report():
            return report_view(shown)
        case Cards():
            return cards_view(shown)
