"""Shows what one job costs on many cards, by what they are rented for, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import GOOD, Column, columned, hanging, section
from autotrain_mem.types.gpu_comparison import Cards, CardVerdict
from autotrain_mem.types.price import Price

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
    grid = columned(cards.priced, _columns(cards, whole=whole), lambda each: bool(_marks(cards, each)))
    lines = [hanging(line) for line in _legend(cards)]
    return [*section(f"what {what} costs at rental prices, in {currency}"), Text(), grid, Text(), *lines]


def _columns(cards: Cards, *, whole: bool) -> list[Column[CardVerdict]]:
    time = [Column("time", _time, right=True)] if whole else []
    return [
        Column("", lambda each: Text(_marks(cards, each), style=GOOD)),
        Column("card", lambda each: formatting.cards(each.hardware)),
        Column("level", lambda each: formatting.short_level(each.level)),
        *time,
        Column("cost" if whole else _PER_TOKENS, lambda each: _cost(each, whole=whole), right=True),
        Column("an hour", lambda each: formatting.amount(_price(each).per_hour), right=True),
        Column("seen", lambda each: _price(each).seen or "-"),
    ]


def _price(verdict: CardVerdict) -> Price:
    assert verdict.price is not None, "it is one of the priced"
    return verdict.price


def _time(verdict: CardVerdict) -> str:
    return "" if verdict.run_seconds is None else formatting.duration(verdict.run_seconds)


def _cost(verdict: CardVerdict, *, whole: bool) -> str:
    cost = verdict.cost if whole else verdict.cost_per_million_tokens
    return "" if cost is None else formatting.amount(cost)


def _named(cards: Cards) -> dict[str, tuple[CardVerdict | None, str]]:
    return {
        "$": (cards.cheapest, "the cheapest"),
        "^": (cards.fastest, "the fastest"),
        "=": (cards.best_value, "the best of both: least time x cost"),
    }


def _marks(cards: Cards, verdict: CardVerdict) -> str:
    return "".join(sign for sign, (chosen, _) in _named(cards).items() if chosen is verdict)


def _legend(cards: Cards) -> list[str]:
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
