"""Predicted against measured tokens per second, and how well their order is kept."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

RANKED_FROM = 3
"""Distinct values from which on an order says something."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One row: tokens per second."""

    model: str
    family: str
    mark: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def tau(rows: list[Result]) -> float:
    """Kendall's, of all pairs that were measured as different: in order less out of order; a tie counts as neither."""
    signs = [
        _sign(one.measured - other.measured) * _sign(one.predicted - other.predicted)
        for one, other in itertools.combinations(rows, 2)
        if one.measured != other.measured
    ]
    return sum(signs) / len(signs) if signs else 1.0


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


def distinct(rows: list[Result]) -> int:
    """How many different speeds were measured."""
    return len({row.measured for row in rows})


def grouped(rows: Iterable[Result], name: Callable[[Result], str]) -> dict[str, list[Result]]:
    """Rows by a name of theirs, in their order."""
    found: dict[str, list[Result]] = defaultdict(list)
    for row in rows:
        found[name(row)].append(row)
    return found


def line(name: str, rows: list[Result]) -> str:
    """Tau, where there is an order; median, least and most of predicted to measured; how many rows."""
    ratios = [row.ratio for row in rows]
    order = f"{tau(rows):5.2f}" if distinct(rows) >= RANKED_FROM else "    -"
    return f"{order} {statistics.median(ratios):5.2f} {min(ratios):5.2f} {max(ratios):5.2f} {len(rows):3d}  {name}"
