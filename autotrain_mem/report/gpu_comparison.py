"""One job on many cards, as a table."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.status import Status
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.costs import costs
from autotrain_mem.report.layout import BAD, GOOD, QUIET, Block, Scale, add, hanging, scale_for, table, title
from autotrain_mem.report.progress import Redrawn, is_live, say
from autotrain_mem.search.levers import pulled
from autotrain_mem.types import Candidate, Counting, Hardware, Knobs
from autotrain_mem.types.gpu_comparison import BRIEF, OFFLOADING, Cards, CardVerdict

SMALLEST = ">"


def _offloads(knobs: Knobs) -> bool:
    return any(row.offloads for row in pulled(knobs))


_MARKS: dict[str, tuple[Callable[[Knobs], bool], str]] = {
    "*": (lambda knobs: not knobs.gradient_checkpointing, "without gradient checkpointing"),
    "h": (_offloads, "activations or optimizer state wait in the host's memory"),
    "s": (lambda knobs: knobs.is_sharded, "weights, gradients and optimizer state are divided among the GPUs (FSDP)"),
    "+": (lambda knobs: knobs.expandable_segments, f"with {formatting.segments(expandable=True)}"),
}
"""Signs beside the batch: whose they are, and what they mean."""

_NOTE = """\
Speeds are predicted, and rank cards better than they tell seconds.
autofit plan ... --gpu NAME tells the rest, and rehearses the whole model."""


_BATCH = "Batch is rows at once x accumulation."
_BATCH_OF_SEVERAL = "Batch is rows at once x accumulation, on each GPU; memory and needs are of one."


class CardsProgress(Redrawn[Status]):
    """A line on stderr that says which card is being planned for; one for each where nobody watches a terminal."""

    def __init__(self, console: Console, count: int) -> None:
        super().__init__(console.status("") if is_live(console) else None)
        self._console = console
        self._count = count
        self._seen: dict[str, int] = {}

    def counting(self, counting: Counting) -> None:
        """Tokens of the data are being counted, before any card is looked at."""
        if self._line is not None:
            rows = formatting.counted(counting.rows, "row")
            self._line.update(Text(f"counting tokens: {counting.done:,} of {rows}"))

    def tried(self, card: Hardware, attempt: Candidate) -> None:
        """A configuration was judged for a card."""
        name = formatting.cards(card)
        is_new = name not in self._seen
        number = self._seen.setdefault(name, len(self._seen) + 1)
        line = f"card {number} of {self._count}: {name}"
        if self._line is not None:
            self._line.update(Text(f"{line}, {formatting.batch(attempt.knobs)}"))
        elif is_new:
            say(self._console, line)


def cards_view(cards: Cards) -> RenderableType:
    """A line for each card, smallest first."""
    smallest, scale = cards.smallest_lossless, scale_for(max(each.hardware.total_bytes for each in cards.verdicts))
    refused = dict.fromkeys(each.refusal for each in cards.verdicts if each.refusal and each.refusal not in BRIEF)
    reasons = {reason: f"[{number}]" for number, reason in enumerate(refused, start=1)}
    knobs = [each.estimate.knobs for each in cards.verdicts if each.estimate is not None]
    several = any(each.hardware.topology.processes > 1 for each in cards.verdicts)
    rows = _Rows(scale, reasons, lengths=len(set(map(_tokens, knobs))) > 1, several=several)
    length = f"; {formatting.settings(knobs[0], ['max_length'])}" if knobs and not rows.lengths else ""
    counts, length_column = ["gpus"] if several else [], ["length"] if rows.lengths else []
    grid = table("", "card", *counts, "memory", "level", "batch", *length_column, "needs", "tokens/s")
    for column in (2, *([3] if several else []), *range(5 + several, len(grid.columns))):
        grid.columns[column].justify = "right"
    for verdict in cards.verdicts:
        mark = Text(SMALLEST if verdict is smallest else "", style=GOOD)
        add(grid, mark, *rows.cells(verdict), style="bold" if verdict is smallest else "")
    heading = title(f"what fits on each card; memory and needs are in {scale.unit}{length}")
    legend = [*_legend(cards, knobs, reasons), Text(_NOTE, style=QUIET)]
    return Block(Group(heading, Text(), grid, Text(), *legend, *costs(cards)))


class _Rows:
    """Holds what a line says of its card."""

    def __init__(self, scale: Scale, reasons: dict[str, str], *, lengths: bool, several: bool) -> None:
        self._scale = scale
        self._reasons = reasons
        """The mark of each reason for a refusal, which may be too long for a line."""
        self.lengths = lengths
        """Whether a line says how long rows are: where they are not the same everywhere."""
        self._several = several
        """Whether it says how many cards there are."""

    def cells(self, verdict: CardVerdict) -> list[str | Text]:
        card = verdict.hardware
        counts = [formatting.device_count(card)] if self._several else []
        named: list[str | Text] = [card.name, *counts, self._size(card.total_bytes)]
        if verdict.estimate is None:
            mark = self._reasons.get(verdict.refusal or "")
            return [*named, Text(f"refused {mark}" if mark else verdict.refusal or "", style=BAD)]
        estimate, knobs = verdict.estimate, verdict.estimate.knobs
        signs = "".join(sign for sign, (has, _) in _MARKS.items() if has(knobs))
        speed = formatting.rate(estimate.tokens_per_second) if formatting.has_speed(estimate.time) else "-"
        length = [_tokens(knobs)] if self.lengths else []
        batch = f"{formatting.batch(knobs)} {signs}".rstrip()
        level, needs = formatting.short_level(verdict.level), self._size(estimate.required_bytes)
        return [*named, level, batch, *length, needs, speed]

    def _size(self, size_bytes: int) -> str:
        return self._scale.write(self._scale.steps(size_bytes))


def _tokens(knobs: Knobs) -> str:
    return str(knobs.completion_length or knobs.max_length or "whole")


def _legend(cards: Cards, knobs: list[Knobs], reasons: dict[str, str]) -> list[RenderableType]:
    """Shows what the table has, and no more."""
    signs = {sign: meaning for sign, (has, meaning) in _MARKS.items() if any(map(has, knobs))}
    unknown = any(each.estimate is not None and not formatting.has_speed(each.estimate.time) for each in cards.verdicts)
    lines = [_smallest(cards)]
    lines += [f"{sign}  {meaning}" for sign, meaning in signs.items()]
    lines += ["-  not known: the card's rates are not"] if unknown else []
    lines += [f"{mark}  {reason}" for reason, mark in reasons.items()]
    lines += [_BATCH_OF_SEVERAL if any(each.processes > 1 for each in knobs) else _BATCH] if knobs else []
    return [hanging(line) for line in lines]


def _smallest(cards: Cards) -> str:
    smallest = cards.smallest_lossless
    if smallest is None:
        return "No card here trains what was asked for, unchanged."
    how = "with the host's memory" if (smallest.level or "").endswith(OFFLOADING) else "in its own memory"
    card = "set of cards" if any(each.hardware.topology.processes > 1 for each in cards.verdicts) else "card"
    return f"{SMALLEST}  the smallest {card} that trains what was asked for, unchanged, {how}"
