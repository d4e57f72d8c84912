"""Compares one job on many cards: what fits on each, and what the training costs."""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import BAD, GOOD, QUIET, Indented, add, hanging, scale_for, section, table
from autotrain_mem.settings.levers import pulled
from autotrain_mem.support.units import amount, duration, format_bytes, rate
from autotrain_mem.types import Knobs
from autotrain_mem.types.gpu_comparison import BRIEF, NOTHING_FITS, OFFLOADING, Cards, CardVerdict

SMALLEST = ">"

_MARKS: dict[str, tuple[Callable[[Knobs], bool], str]] = {
    "*": (lambda knobs: not knobs.recomputes, "without gradient checkpointing"),
    "h": (
        lambda knobs: any(row.offloads for row in pulled(knobs)),
        "activations or optimizer state are in the host's memory",
    ),
    "s": (lambda knobs: knobs.is_sharded, "weights, gradients and optimizer state are divided among the GPUs (FSDP)"),
    "+": (lambda knobs: knobs.expandable_segments, "expandable segments; without this sign, fixed-size segments"),
}
"""Sign beside a batch -> a function that returns whether knobs get the sign, and the sign's meaning."""

_CARDS_NOTE = """\
Speeds are predictions: trust the order of the cards more than the numbers.
autofit plan ... --gpu NAME plans for one card, and rehearses the whole model."""

_BATCH = "Batch: micro-batch x gradient accumulation."
_BATCH_OF_SEVERAL = "Batch: micro-batch x gradient accumulation on each GPU; memory and needs are for one GPU."


def cards_view(cards: Cards) -> RenderableType:
    """Shows a line for each card, smallest first, with a column of row lengths if they differ. Cards on which nothing
    fits share a line."""
    smallest, scale = cards.smallest_lossless, scale_for(max(each.hardware.total_bytes for each in cards.verdicts))
    refused = dict.fromkeys(each.refusal for each in cards.verdicts if each.refusal and each.refusal not in BRIEF)
    reasons = {reason: f"[{number}]" for number, reason in enumerate(refused, start=1)}  # too long for a line
    knobs = [each.estimate.knobs for each in cards.verdicts if each.estimate is not None]
    lengths = len(set(map(_tokens, knobs))) > 1
    length_column = ["length"] if lengths else []
    grid = table("", "card", "memory", "level", "batch", *length_column, "needs", "tokens/s", right=(2, 5, 6, 7))
    none = [each for each in cards.verdicts if each.refusal == NOTHING_FITS]
    for verdict in (each for each in cards.verdicts if each not in none):
        card, estimate = verdict.hardware, verdict.estimate
        cells: list[str | Text] = [formatting.cards(card), scale.size(card.total_bytes)]
        if estimate is None:
            number = reasons.get(verdict.refusal or "")
            cells.append(Text(f"refused {number}" if number else verdict.refusal or "", style=BAD))
        else:
            signs = "".join(sign for sign, (has, _) in _MARKS.items() if has(estimate.knobs))
            length = [_tokens(estimate.knobs)] if lengths else []
            cells += [_short_level(verdict.level), f"{formatting.batch(estimate.knobs)} {signs}".rstrip()]
            speed = rate(estimate.tokens_per_second) if formatting.has_speed(estimate.time) else "-"
            cells += [*length, scale.size(estimate.required_bytes), speed]
        mark = Text(SMALLEST if verdict is smallest else "", style=GOOD)
        add(grid, mark, *cells, style="bold" if verdict is smallest else "")
    same_length = f"; {formatting.settings(knobs[0], ['max_length'])}" if knobs and not lengths else ""
    heading = Text(f"what fits on each card; memory and needs are in {scale.unit}{same_length}", style="bold")
    legend = ["No card here can run the training as requested."]
    if smallest is not None:
        how = "with the host's memory" if (smallest.level or "").endswith(OFFLOADING) else "in its own memory"
        card_or_set = "set of cards" if any(each.hardware.topology.processes > 1 for each in cards.verdicts) else "card"
        card_or_set += " with a known price" if smallest.price is not None else ""
        legend = [f"{SMALLEST}  the smallest {card_or_set} that trains what was asked for, unchanged, {how}"]
    legend = [*nothing_fits(none), *legend]
    legend += [f"{sign}  {meaning}" for sign, (has, meaning) in _MARKS.items() if any(map(has, knobs))]
    if any(each.estimate is not None and not formatting.has_speed(each.estimate.time) for each in cards.verdicts):
        legend.append("-  unknown, since the card's rates are unknown")
    legend += [f"{mark}  {reason}" for reason, mark in reasons.items()]
    if knobs:
        legend.append(_BATCH_OF_SEVERAL if any(each.processes > 1 for each in knobs) else _BATCH)
    note = Text(_CARDS_NOTE, style=QUIET)
    fitting: list[RenderableType] = [grid, Text()] if grid.row_count else []
    return Indented(Group(heading, Text(), *fitting, *map(hanging, legend), note, *costs(cards)))


def nothing_fits(verdicts: Sequence[CardVerdict]) -> Iterator[str]:
    """Yields a line for the cards on which nothing fits, and one for those that lack little."""
    known = [(each, each.least) for each in verdicts if each.least is not None]
    if verdicts:
        needed = min((least.required_bytes for _, least in known), default=None)
        needs = "the weights alone are larger" if needed is None else f"at least {format_bytes(needed)} are needed"
        yield f"nothing fits on {_named(verdicts)}: {needs}"
    for each, least in known:
        if each.nearest:
            missing = format_bytes(least.required_bytes - least.budget_bytes)
            yield f"{formatting.cards(each.hardware)} lacks {missing}: {each.nearest} would fit"


_ENTRIES = 12
"""The most cards without a plan or a price that are named; if there are more, they are counted."""


def _named(verdicts: Sequence[CardVerdict]) -> str:
    names = [formatting.cards(each.hardware) for each in verdicts]
    return ", ".join(names) if len(names) <= _ENTRIES else f"{len(names)} cards"


def _short_level(level: str | None) -> str:
    """Returns ``8-bit LoRA``, so that a line fits 80 columns; what follows a comma has its own sign."""
    name = (level or "").partition(",")[0]
    return name.replace("LoRA on an 8-bit base", "8-bit LoRA")


def _tokens(knobs: Knobs) -> str:
    return str(knobs.completion_length or knobs.max_length or "whole")


def costs(cards: Cards) -> list[RenderableType]:
    """Shows a line for each card with a price, the cheapest first; nothing if no card has one."""
    if not cards.priced:
        return []
    whole = all(each.cost is not None for each in cards.priced)
    best = {
        "$": (cards.cheapest, "the cheapest"),
        "^": (cards.fastest, "the fastest"),
        "=": (cards.best_value, "the best compromise: least time x cost"),
    }
    price = ("time", "cost") if whole else ("1M tokens",)
    grid = table("", "card", "level", *price, "an hour", "seen", right=tuple(range(3, 4 + len(price))))
    currency, sources = "", dict[str, list[str]]()
    for each in cards.priced:
        assert each.price is not None, "cards.priced lists only these"
        currency = currency or each.price.currency
        names = sources.setdefault(each.price.provider or "your file", [])
        names += [each.price.gpu] if each.price.gpu not in names else []
        marks = "".join(sign for sign, (chosen, _) in best.items() if chosen is each)
        cells = [formatting.cards(each.hardware), _short_level(each.level)]
        cells += ["" if each.run_seconds is None else duration(each.run_seconds)] if whole else []
        cost = each.cost if whole else each.cost_per_million_tokens
        cells += ["" if cost is None else amount(cost), amount(each.price.per_hour), each.price.seen or "-"]
        add(grid, Text(marks, style=GOOD), *cells, style="bold" if marks else "")
    least, differ = _short_level(cards.comparable[0].level), len(cards.comparable) < len(cards.priced)
    among = f" of those at the level {least}" if differ else ""
    lines = [f"{sign}  {meaning}{among}" for sign, (_, meaning) in best.items()]
    listed = ", ".join(f"{provider} ({', '.join(names)})" for provider, names in sources.items())
    lines.append(f"prices  for one card and hour, as listed by {listed}; they change: --prices FILE replaces them")
    if without := [each for each in cards.verdicts if each.estimate is not None and each.price is None]:
        lines.append(f"no price is known for {_named(without)}")
    flags = "--dataset, --max_steps or --tokens"
    what = "the training" if whole else f"a million trained tokens (with {flags}: the whole training)"
    most = " at most" if whole and cards.at_most else ""
    return section(f"what {what} costs{most} at rental prices, in {currency}", Text(), grid, Text(), *lines, indent=0)
