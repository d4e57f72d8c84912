"""Makes of each figure of a page what its HTML holds: a sentence, a table, and what the script draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotrain_mem.support.units import format_bytes

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
