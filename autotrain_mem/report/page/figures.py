"""Makes of each figure of a page what its HTML holds: a sentence, a table, and what the script draws."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autotrain_mem.units import format_bytes

if TYPE_CHECKING:
    from autotrain_mem.spec.page import Page

MOST_ROWS = 60
"""Of the table that stands in a figure's place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Holds a figure as text, and as data for the script."""

    key: str
    """Is unique on the page, and made of small letters, digits and hyphens."""
    title: str
    summary: str
    """Says in a sentence, with figures, what the eye sees."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """At most about ``MOST_ROWS``."""
    data: Mapping[str, Any]
    """``kind`` and what the script of that name in ``static`` draws."""


def figures_of(page: Page) -> tuple[Figure, ...]:
    """Makes the figures of a page, in their order, each with a key of its own."""
    from autotrain_mem.report.page.charts import bars_figure, chart_figure
    from autotrain_mem.report.page.timelines import timeline_figure

    figures = [
        *map(timeline_figure, page.timelines),
        *map(chart_figure, page.charts),
        *map(bars_figure, page.bars),
    ]
    keys = unique([each.key for each in figures])
    return tuple(replace(each, key=key) for each, key in zip(figures, keys, strict=True))


def unique(keys: list[str]) -> Iterator[str]:
    """Yields the keys as parts of a file's name, each another.

    >>> list(unique(["loss", "Loss!", "<b>"]))
    ['loss', 'loss-2', 'b']
    """
    seen = set[str]()
    for key in keys:
        slug = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")[:60] or "figure"
        candidates = (slug if count == 1 else f"{slug}-{count}" for count in range(1, len(keys) + 1))
        seen.add(chosen := next(each for each in candidates if each not in seen))
        yield chosen


def format_value(value: float | None, unit: str) -> str:
    """Writes a value with its unit.

    >>> format_value(2.5 * 2**30, "bytes"), format_value(1234.56, "tokens/s"), format_value(None, "")
    ('2.50 GiB', '1,235 tokens/s', '')
    """
    if value is None:
        return ""
    if unit == "bytes":
        return format_bytes(round(value))
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{digits} {unit}".rstrip()


def spread(count: int, wanted: set[int], most: int = MOST_ROWS) -> list[int]:
    """Chooses at most ``most`` indices, evenly, and those that are ``wanted``."""
    step = max(1, -(-count // most))
    return sorted({*range(0, count, step), *wanted, *([count - 1] if count else [])})
