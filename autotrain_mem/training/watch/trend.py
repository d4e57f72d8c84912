"""Tells whether a noisy series rises: a leak from long rows, and host memory that ends from a busy minute."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

QUARTER = 8
"""Samples whose least counts as their floor."""
WINDOW = 4 * QUARTER
SPIKES = 2
"""Of a quarter, samples that may lie anywhere above the others: a long row, an evaluation that left something."""
STEEP = 2.5
"""Times what the others of a quarter lie apart, that floors must rise by: of 200,000 windows of noise, none of an even
or a skewed one climbs, of a normal one 2 do (drawn by ``random``, seed 1, 2026-11-21; at 1.5 times, 11 and 95 do)."""
CLIMBED = 3 * QUARTER / (WINDOW - 1)
"""Of a window: what lies between the floors of its first and of its last quarter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Climb:
    """Floors that rise."""

    start: float
    end: float

    @property
    def rise(self) -> float:
        return self.end - self.start


def climb_of(values: Sequence[float]) -> Climb | None:
    """A steady rise of ``WINDOW`` values, seen through noise; None where there is none.

    The least of each quarter is its floor: a long row, a batch that waits, a cache raise the top and not the floor. All
    floors rise, the last not much less than the others (a warm-up slows down), and in all by more than the values of
    one quarter lie apart, its highest left out.
    """
    if not floors_rise(values):
        return None
    quarters = _quarters(values)
    start, third, end = min(quarters[0]), min(quarters[2]), min(quarters[3])
    rise = end - start
    apart = statistics.median(sorted(quarter)[-1 - SPIKES] - min(quarter) for quarter in quarters)
    slows_down = end - third < rise / 4  # an even share is a third
    return None if slows_down or rise < STEEP * apart else Climb(start=start, end=end)


def floors_rise(values: Sequence[float]) -> bool:
    """Whether the least of each quarter lies above that of the quarter before, by whatever it is."""
    return all(before < after for before, after in itertools.pairwise(map(min, _quarters(values))))


def _quarters(values: Sequence[float]) -> list[Sequence[float]]:
    return [values[start : start + QUARTER] for start in range(0, WINDOW, QUARTER)]
