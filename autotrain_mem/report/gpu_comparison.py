"""One job on many cards, as a table."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.status import Status
from rich.text import Text

from autotrain_mem.planner.levers import pulled
from autotrain_mem.report import formatting
from autotrain_mem.report.column_rounding import Scale, scale_for
from autotrain_mem.report.layout import BAD, GOOD, QUIET, Block, add, hanging, table, title
from autotrain_mem.report.progress import Redrawn
from autotrain_mem.spec import Candidate, Counting, Estimate, Hardware, Knobs
from autotrain_mem.spec.gpu_comparison import NOTHING_FITS, Cards, CardVerdict

SMALLEST = ">"

OFFLOADING = ", offloading"
_SHORT = {"LoRA on an 8-bit base": "8-bit LoRA", "LoRA on a 4-bit base": "4-bit LoRA"}
"""Levels in fewer letters, so that a line stays within 80 columns."""

_MARKS: dict[str, tuple[Callable[[Knobs], bool], str]] = {
    "*": (lambda knobs: not knobs.gradient_checkpointing, "without gradient checkpointing"),
    "h": (
        lambda knobs: any(row.offloads for row in pulled(knobs)),
        "activations or optimizer state wait in the host's memory",
    ),
    "+": (lambda knobs: knobs.expandable_segments, f"with {formatting.segments(expandable=True)}"),
}
"""Signs beside the batch: whose they are, and what they mean."""

_NOTE = """\
Speeds are predicted, and rank cards better than they tell seconds.
autofit plan ... --gpu NAME tells the rest, and rehearses the whole model."""


class CardsProgress(Redrawn[Status]):
    """A line on stderr that says which card is being planned for; nothing where nobody watches a terminal."""

    def __init__(self, console: Console, count: int) -> None:
        super().__init__(console.status("") if console.is_terminal else None)
        self._count = count
        self._seen: dict[str, int] = {}

    def counting(self, counting: Counting) -> None:
        """Tokens of the data are being counted, before any card is looked at."""
        if self._line is not None:
            self._line.update(f"counting tokens: {counting.done:,} of {counting.rows:,} rows")

    def tried(self, card: Hardware, attempt: Candidate) -> None:
        """A configuration was judged for a card."""
        number = self._seen.setdefault(card.name, len(self._seen) + 1)
        if self._line is not None:
            self._line.update(f"card {number} of {self._count}: {card.name}, {formatting.batch(attempt.knobs)}")


def cards_view(cards: Cards) -> RenderableType:
    """A line for each card, smallest first."""
    smallest, scale = cards.smallest_lossless, scale_for(max(each.hardware.total_bytes for each in cards.verdicts))
    rows = _Rows(scale, _reasons(cards), lengths=_differ_in_length(cards))
    grid = table("", "card", "memory", "level", "batch", *(["length"] if rows.lengths else []), "needs", "tokens/s")
    for column in (2, *range(5, len(grid.columns))):
        grid.columns[column].justify = "right"
    for verdict in cards.verdicts:
        mark = Text(SMALLEST if verdict is smallest else "", style=GOOD)
        add(grid, mark, *rows.cells(verdict), style="bold" if verdict is smallest else "")
    heading = title(f"what fits on each card; memory and needs are in {scale.unit}{_length(cards)}")
    return Block(Group(heading, Text(), grid, Text(), *_legend(cards, rows), Text(_NOTE, style=QUIET)))


class _Rows:
    """Holds what a line says of its card."""

    def __init__(self, scale: Scale, reasons: dict[str, str], *, lengths: bool) -> None:
        self.reasons = reasons
        """The mark of each reason for a refusal, which may be too long for a line."""
        self.lengths = lengths
        """Whether a line says how long rows are: where they are not the same everywhere."""
        self._scale = scale

    def cells(self, verdict: CardVerdict) -> list[str | Text]:
        card = verdict.hardware
        named: list[str | Text] = [card.name, self._size(card.total_bytes)]
        if verdict.estimate is None:
            return [*named, Text(_refusal(verdict, self.reasons), style=BAD)]
        return [*named, _short(verdict.level or ""), *self._plan(verdict.estimate)]

    def _plan(self, estimate: Estimate) -> list[str | Text]:
        knobs = estimate.knobs
        signs = "".join(sign for sign, (has, _) in _MARKS.items() if has(knobs))
        speed = formatting.rate(estimate.tokens_per_second) if formatting.has_speed(estimate.time) else "-"
        length = [_tokens(knobs)] if self.lengths else []
        return [f"{formatting.batch(knobs)} {signs}".rstrip(), *length, self._size(estimate.required_bytes), speed]

    def _size(self, size_bytes: int) -> str:
        return self._scale.write(self._scale.steps(size_bytes))


def _short(level: str) -> str:
    """``4-bit LoRA`` for ``LoRA on a 4-bit base, offloading``: a sign beside the batch tells of offloading."""
    name = level.removesuffix(OFFLOADING)
    return _SHORT.get(name, name)


def _reasons(cards: Cards) -> dict[str, str]:
    refused = dict.fromkeys(each.refusal for each in cards.verdicts if each.refusal and each.refusal != NOTHING_FITS)
    return {reason: f"[{number}]" for number, reason in enumerate(refused, start=1)}


def _refusal(verdict: CardVerdict, reasons: dict[str, str]) -> str:
    refusal = verdict.refusal or ""
    return f"refused {reasons[refusal]}" if refusal in reasons else refusal


def _knobs(cards: Cards) -> list[Knobs]:
    return [each.estimate.knobs for each in cards.verdicts if each.estimate is not None]


def _differ_in_length(cards: Cards) -> bool:
    return len(set(map(_tokens, _knobs(cards)))) > 1


def _tokens(knobs: Knobs) -> str:
    return str(knobs.completion_length or knobs.max_length or "whole")


def _length(cards: Cards) -> str:
    """Said once where it is the same everywhere."""
    knobs = _knobs(cards)
    if not knobs or _differ_in_length(cards):
        return ""
    return f"; {formatting.settings(knobs[0], ['max_length'])}"


def _legend(cards: Cards, rows: _Rows) -> list[RenderableType]:
    """Shows what the table has, and no more."""
    signs = {sign: meaning for sign, (has, meaning) in _MARKS.items() if any(map(has, _knobs(cards)))}
    unknown = any(each.estimate is not None and not formatting.has_speed(each.estimate.time) for each in cards.verdicts)
    lines = [_smallest(cards)]
    lines += [f"{sign}  {meaning}" for sign, meaning in signs.items()]
    lines += ["-  not known: the card's rates are not"] if unknown else []
    lines += [f"{mark}  {reason}" for reason, mark in rows.reasons.items()]
    lines += ["Batch is rows at once x accumulation."] if _knobs(cards) else []
    return [hanging(line) for line in lines]


def _smallest(cards: Cards) -> str:
    smallest = cards.smallest_lossless
    if smallest is None:
        return "No card here trains what was asked for, unchanged."
    how = "with the host's memory" if (smallest.level or "").endswith(OFFLOADING) else "in its own memory"
    return f"{SMALLEST}  the smallest card that trains what was asked for, unchanged, {how}"
