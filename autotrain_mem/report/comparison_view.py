"""Compares: one job on many cards, with what they cost; and how much fits at each level of harm."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import (
    BAD,
    GOOD,
    QUIET,
    Bar,
    Block,
    Column,
    Scale,
    add,
    columned,
    hanging,
    scale_for,
    section,
    table,
    title,
)
from autotrain_mem.report.layout import table as plain_table
from autotrain_mem.search.levers import pulled
from autotrain_mem.support.units import amount, duration, format_bytes, rate
from autotrain_mem.types import Knobs
from autotrain_mem.types.gpu_comparison import BRIEF, OFFLOADING, Cards, CardVerdict
from autotrain_mem.types.most import Frontier, Reach
from autotrain_mem.types.price import Price

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

_CARDS_NOTE = """\
Speeds are predicted, and rank cards better than they tell seconds.
autofit plan ... --gpu NAME tells the rest, and rehearses the whole model."""


_BATCH = "Batch is rows at once x accumulation."
_BATCH_OF_SEVERAL = "Batch is rows at once x accumulation, on each GPU; memory and needs are of one."


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
    legend = [*_legend(cards, knobs, reasons), Text(_CARDS_NOTE, style=QUIET)]
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
        speed = rate(estimate.tokens_per_second) if formatting.has_speed(estimate.time) else "-"
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


_ENTRIES = 12
"""Cards without a price that are named, before it is said how many more there are."""

_PER_TOKENS = "1M tokens"


def costs(cards: Cards) -> list[RenderableType]:
    """A line for each card with a price, the cheapest first; nothing where no card has one."""
    if not cards.priced:
        return []
    currency = _price(cards.priced[0]).currency
    whole = all(each.cost is not None for each in cards.priced)
    what = "the training" if whole else "a million trained tokens (name --dataset or --max_steps for the training)"
    grid = columned(cards.priced, _cost_columns(cards, whole=whole), lambda each: bool(_marks(cards, each)))
    lines = [hanging(line) for line in _price_legend(cards)]
    return [*section(f"what {what} costs at rental prices, in {currency}"), Text(), grid, Text(), *lines]


def _cost_columns(cards: Cards, *, whole: bool) -> list[Column[CardVerdict]]:
    time = [Column("time", _time, right=True)] if whole else []
    return [
        Column("", lambda each: Text(_marks(cards, each), style=GOOD)),
        Column("card", lambda each: formatting.cards(each.hardware)),
        Column("level", lambda each: formatting.short_level(each.level)),
        *time,
        Column("cost" if whole else _PER_TOKENS, lambda each: _cost(each, whole=whole), right=True),
        Column("an hour", lambda each: amount(_price(each).per_hour), right=True),
        Column("seen", lambda each: _price(each).seen or "-"),
    ]


def _price(verdict: CardVerdict) -> Price:
    assert verdict.price is not None, "it is one of the priced"
    return verdict.price


def _time(verdict: CardVerdict) -> str:
    return "" if verdict.run_seconds is None else duration(verdict.run_seconds)


def _cost(verdict: CardVerdict, *, whole: bool) -> str:
    cost = verdict.cost if whole else verdict.cost_per_million_tokens
    return "" if cost is None else amount(cost)


def _named(cards: Cards) -> dict[str, tuple[CardVerdict | None, str]]:
    return {
        "$": (cards.cheapest, "the cheapest"),
        "^": (cards.fastest, "the fastest"),
        "=": (cards.best_value, "the best of both: least time x cost"),
    }


def _marks(cards: Cards, verdict: CardVerdict) -> str:
    return "".join(sign for sign, (chosen, _) in _named(cards).items() if chosen is verdict)


def _price_legend(cards: Cards) -> list[str]:
    least, differ = formatting.short_level(cards.comparable[0].level), len(cards.comparable) < len(cards.priced)
    among = f" of those at the level {least}" if differ else ""
    lines = [f"{sign}  {meaning}{among}" for sign, (_, meaning) in _named(cards).items()]
    sources = _sources([_price(each) for each in cards.priced])
    lines.append(f"prices  of a card for an hour, {sources}; they move: --prices FILE holds your own")
    fitting = [each for each in cards.verdicts if each.estimate is not None]
    without = [formatting.cards(each.hardware) for each in fitting if each.price is None]
    if without:
        more = f" and {len(without) - _ENTRIES} more" if len(without) > _ENTRIES else ""
        lines.append(f"no price is known for {', '.join(without[:_ENTRIES])}{more}")
    return lines


def _sources(prices: Sequence[Price]) -> str:
    """``as listed by RunPod Community (rtx4090, l4), AWS (a10g)``."""
    cards: dict[str, list[str]] = {}
    for price in prices:
        names = cards.setdefault(price.provider or "your file", [])
        names += [price.gpu] if price.gpu not in names else []
    return "as listed by " + ", ".join(f"{provider} ({', '.join(names)})" for provider, names in cards.items())


BAR_WIDTH = 40

_FRONTIER_NOTE = """\
Each level is at its least demanding settings there, rehearsed on copies of few layers where these tell the whole.
tokens/s are of these settings, and so a lower bound: a plan for the same {name} may be faster.
--{name} max plans with the most of the first level that holds any, confirmed on the whole model."""


def frontier_view(frontier: Frontier) -> RenderableType:
    """Shows for each level the most that fits, what it needs and how fast it is, and the same as bars."""
    scale = scale_for(frontier.budget_bytes)
    heading = f"{frontier.name} on {frontier.gpu}, level by level; the budget is {format_bytes(frontier.budget_bytes)}"
    parts: list[RenderableType] = [title(heading), Text(), columned(frontier.reaches, _reach_columns(frontier, scale))]
    if reached := [each for each in frontier.reaches if each.most is not None]:
        parts += [Text(), _bars(reached)]
    ends = dict.fromkeys(each.most.stopped_by for each in reached if each.most is not None and each.most.stopped_by)
    parts += [
        Text(),
        *(hanging(f"=  {end}") for end in ends),
        Text(_FRONTIER_NOTE.format(name=frontier.name), style=QUIET),
    ]
    return Block(Group(*parts))


def _reach_columns(frontier: Frontier, scale: Scale) -> list[Column[Reach]]:
    return [
        Column("level", lambda each: each.level),
        Column(frontier.name, _most_of, right=True),
        Column("does not fit", _beyond, right=True),
        Column("needs", lambda each: "" if each.point is None else _size(scale, each.point.required_bytes), right=True),
        Column("tokens/s", _speed, right=True),
        Column("batch", lambda each: "" if each.point is None else formatting.batch(each.point.knobs)),
    ]


def _most_of(reach: Reach) -> Text:
    return Text("nothing fits", style=BAD) if reach.most is None else Text(f"{reach.most.value:,}")


def _beyond(reach: Reach) -> str:
    """The neighbour; ``=`` where something else than the card ends it."""
    if reach.most is None:
        return ""
    return "=" if reach.most.next_value is None else f"{reach.most.next_value:,}"


def _speed(reach: Reach) -> str:
    if reach.point is None:
        return ""
    speed = reach.point.tokens_per_second
    return "-" if not speed else rate(speed)


def _size(scale: Scale, size_bytes: int) -> str:
    return scale.write(scale.steps(size_bytes))


def _bars(reached: Sequence[Reach]) -> Table:
    """Draws a bar for each level, as long as what fits there, on one scale."""
    longest = max(each.most.value for each in reached if each.most is not None)
    grid = plain_table("", "", "", show_header=False)
    for each in reached:
        value = 0 if each.most is None else each.most.value
        add(grid, each.level, Bar(value / longest, BAR_WIDTH), f"{value:,}")
    return grid
