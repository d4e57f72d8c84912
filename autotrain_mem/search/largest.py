"""Finds the largest value of one knob that fits a card, with all settings that the user gave.

Each level is tested with its least demanding point. Beyond that point's border, the whole batch at once, which
accumulates no gradients, may still fit. The answer comes from the first level at which the smallest value fits, or from
the next one if that plan is too slow or breaks a limit. Peaks are nearly linear in the value, phase by phase, so two
rehearsals lead near the border; finally, both sides of the border are rehearsed on the whole model.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter

from autotrain_mem.search.explore import MIDDLE_EVERY, surely_fits
from autotrain_mem.search.guess import linear, may_fit_at_once, static_bytes
from autotrain_mem.search.levels import Level, levels
from autotrain_mem.search.memo import Memo
from autotrain_mem.search.search import Limits, SearchResult, find
from autotrain_mem.search.space import Space
from autotrain_mem.types import Estimate, Knobs, LargestValue

TURNS = 12
"""The most guesses for one level; plain bisection of 16,384 values takes 14."""

FAR = 8
"""The least ratio of the second rehearsed value to the smallest: closer ones may both peak in the optimizer step."""

STEEPER = 1.5
"""A guess from a single point lets bytes grow this much faster than the value, so that the next value likely fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Describes the search for the largest value of one knob."""

    name: str
    values: Sequence[int]
    """The candidate values, smallest first; not empty."""
    space: Callable[[int], Space]
    """Returns the job's space with this value."""
    stopped_by: str
    """Why there is no larger value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """Holds the last value of a level that fits, and the next one, which does not."""

    index: int
    estimate: Estimate
    beyond: Estimate | None
    """None if the last of all values fits."""

    def most(self, question: Question) -> LargestValue:
        """Returns the boundary as an answer."""
        name, value = question.name, question.values[self.index]
        if self.beyond is None:
            return LargestValue(name=name, value=value, next_value=None, stopped_by=question.stopped_by)
        following, needed = getattr(self.beyond.knobs, name), self.beyond.required_bytes
        return LargestValue(name=name, value=value, next_value=following, next_required_bytes=needed)


def find_most(question: Question, memo: Memo, limits: Limits | None = None) -> SearchResult | None:
    """Returns the plan with the largest value that fits; None if no value fits within the limits."""
    tried: set[str] = set()
    best: SearchResult | None = None
    name = next((level.name for level in answering(question) if _holds(question, level, memo)), None)
    while name is not None and name not in tried:
        tried.add(name)
        if (border := find_border(question, name, memo)) is None:
            break
        if (found := find(question.space(question.values[border.index]), memo, limits)) is None:
            break
        best, name = replace(found, most=border.most(question)), found.level
    return best


def answering(question: Question) -> tuple[Level, ...]:
    """Returns the levels that an answer may come from: all that cut no rows."""
    return tuple(level for level in levels(question.space(question.values[0])) if not level.lengths)


def _holds(question: Question, level: Level, memo: Memo) -> bool:
    if memo.weights_exceed(level.least):
        return False
    if surely_fits(memo, level.least):
        return True
    points, start = _at_once(question, level.name, memo, 0)
    return start is not None and points.holds(start)


def find_border(question: Question, level: str, memo: Memo) -> Boundary | None:
    """Finds the border of one level; None if its smallest value does not fit."""
    border = _border(_Points(question, level, memo, attrgetter("least")), 0)
    following = 0 if border is None else border.index + 1
    if following == len(question.values):
        return border
    points, start = _at_once(question, level, memo, following)
    return border if start is None else _border(points, start) or border


def _at_once(question: Question, level: str, memo: Memo, following: int) -> "tuple[_Points, int | None]":
    """Returns the points of the whole batch at once, and the index from which they may fit although fewer rows do not.
    The index is None if no gradients accumulate anyway, or if these points are too large."""
    accumulated = _Points(question, level, memo, attrgetter("least"))(following)
    points, ends = _Points(question, level, memo, attrgetter("at_once")), (following, len(question.values) - 1)
    start = next((each for each in ends if points.knobs(each).gradient_accumulation_steps == 1), None)
    if start is None or points.knobs(start) == accumulated.knobs:
        return points, None
    space = question.space(question.values[start])
    return points, start if may_fit_at_once(space, accumulated, points.knobs(start)) else None


def _border(points: "_Points", start: int) -> Boundary | None:
    """Finds the boundary from ``start`` on, both sides rehearsed on the whole model; None if ``start`` does not fit."""
    if not points.holds(start):
        return None
    end = len(points.question.values)
    low, high = _narrowed(points, start, end)
    points.whole = True
    points.ask([side for side in (low, high) if side < end])
    if low > start and not points(low).fits:
        low, high = _narrowed(points, start, low)
    elif high < end and points(high).fits:
        low, high = _narrowed(points, high, end)
    if not points(low).fits:
        return None
    return Boundary(index=low, estimate=points(low), beyond=points(high) if high < end else None)


def _narrowed(points: "_Points", low: int, high: int) -> tuple[int, int]:
    """Narrows the border; the lower side fits, and the upper does not, or is past the last value."""
    for turn in range(1, TURNS + 1):
        if high - low <= 1:
            break
        is_bracketed = high < len(points.question.values)
        halves = is_bracketed and turn % MIDDLE_EVERY == 0
        step = 1 if is_bracketed else 2 ** (turn - 1)
        guess = (low + high) // 2 if halves else points.guess(low, high, at_least=step)
        low, high = (guess, high) if points(guess).fits else (low, guess)
    return low, high


class _Points:
    """Holds a level's point at each value, by index: the least demanding one, or the whole batch at once."""

    def __init__(self, question: Question, level: str, memo: Memo, of: Callable[[Level], Knobs]) -> None:
        self.question = question
        self.whole = False
        self.known: list[int] = []
        self._level = level
        self._memo = memo
        self._of = of

    def __call__(self, index: int) -> Estimate:
        self.ask([index])
        return self._memo(self.knobs(index))

    def ask(self, indices: Sequence[int]) -> None:
        """Rehearses several points at once."""
        self._memo.ask([self.knobs(index) for index in indices], whole=self.whole)
        self.known = sorted({*self.known, *indices})

    @cache  # noqa: B019  it lives as long as a search
    def knobs(self, index: int) -> Knobs:
        every = levels(self.question.space(self.question.values[index]))
        return self._of(next(each for each in every if each.name == self._level))

    def holds(self, index: int) -> bool:
        self.known = [index]
        return surely_fits(self._memo, self.knobs(index))

    def guess(self, low: int, high: int, *, at_least: int) -> int:
        """Returns the largest index between ``low`` and ``high`` that should fit, but at least ``low + at_least``.

        The lower guess of two lines counts: one through both sides of the border (or the two nearest below it), and one
        through the upper side and the point beyond it (:func:`~autotrain_mem.search.explore.most_that_fits`).
        """
        values, budget_bytes, inside = self.question.values, self(low).budget_bytes, range(low + 1, high)
        if self.known == [0]:
            at_least = bisect_left(values, FAR * values[0])
        other = high if high in self.known else next((each for each in reversed(self.known) if each < low), None)
        pairs = [] if other is None else [(low, other)]
        pairs += [(high, each) for each in self.known if each > high][:1]
        lines = [(self(one), self(other), values[one], values[other] - values[one]) for one, other in pairs]
        alone, static = self(low), static_bytes(self(low)) + self(low).outside_bytes

        def needs(index: int) -> float:
            """Guesses the bytes at a value. From one point, all but model and optimizer state grow (``STEEPER``)."""
            if not lines:
                return static + STEEPER * (alone.required_bytes - static) * values[index] / values[low]
            shares = [(start, end, (values[index] - first) / span) for start, end, first, span in lines]
            return min(linear(start, end, share, start.knobs) for start, end, share in shares)

        fitting = bisect_left(inside, True, key=lambda index: needs(index) > budget_bytes)
        return min(max(low + fitting, low + at_least), high - 1)
