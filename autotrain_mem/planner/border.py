"""Finds where a line of ever more demanding points stops fitting, in few rehearsals."""

from __future__ import annotations

from collections.abc import Sequence

from autotrain_mem.planner.guess import between
from autotrain_mem.planner.memo import Memo
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Estimate, Knobs

MIDDLE_EVERY = 3
"""Each third guess is the middle of what is left, so that a curve that misleads the slope costs at most three times
what plain bisection would."""


def most_that_fits(space: Space, points: Sequence[Knobs], memo: Memo, *, turns: int | None = None) -> Estimate | None:
    """The last point that fits, given that the next one was rehearsed and does not; None when the first does not.

    Peak memory is close to linear in the tokens of a micro-batch, so the first and last point give a slope and the
    third rehearsal lands at the border. Both sides of the border are rehearsed, since reserved bytes are not strictly
    monotone and no slope is trusted. With points 1, 2, 4, 8 rows and a border at 4: rehearses 1, 8, then 4.

    Args:
        points: Ordered by demand, not empty.
        turns: How many guesses may follow the first and last point; the best so far is returned then.
    """
    low, high = 0, len(points) - 1
    if not memo(points[low]).fits:
        return None
    if memo(points[high]).fits:
        return memo(points[high])
    turn = 0
    while high - low > 1 and turn != turns:
        turn += 1
        guess = (low + high) // 2 if turn % MIDDLE_EVERY == 0 else _guess(space, points, low, high, memo)
        low, high = (guess, high) if memo(points[guess]).fits else (low, guess)
    return memo(points[low])


def _guess(space: Space, points: Sequence[Knobs], low: int, high: int, memo: Memo) -> int:
    """The last point between two rehearsed ones that the slope says would fit, or else the one next to ``low``."""
    small, large = memo(points[low]), memo(points[high])
    inside = range(high - 1, low, -1)
    fitting = (each for each in inside if between(space, points[each], small, large) <= small.budget_bytes)
    return next(fitting, low + 1)
