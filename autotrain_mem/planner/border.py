"""Where a line of ever more demanding points stops fitting, in few rehearsals."""

from __future__ import annotations

from collections.abc import Sequence

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
    fitting = (each for each in inside if _between(space, points[each], small, large) <= small.budget_bytes)
    return next(fitting, low + 1)


def _between(space: Space, knobs: Knobs, small: Estimate, large: Estimate) -> float:
    """Bytes that a point between two rehearsed ones needs if each phase is linear in tokens.

    By phase, because the optimizer step does not grow with the micro-batch: between 1 row (step 10 GiB, backward
    6 GiB) and 8 rows (10 and 20 GiB) the peak leaves 10 GiB at 3 rows, where a line through 10 and 20 would not.
    """
    start, end = space.micro_batch_tokens(small.knobs), space.micro_batch_tokens(large.knobs)
    share = (space.micro_batch_tokens(knobs) - start) / (end - start) if end > start else 0.0
    phases = small.memory.phases.keys() & large.memory.phases.keys()
    lines = [(small.memory.phases[phase], large.memory.phases[phase]) for phase in phases]
    peaks = [first + share * (last - first) for first, last in lines]
    first, last = _beyond_peak(small), _beyond_peak(large)
    return max(peaks, default=small.memory.peak_allocated_bytes) + first + share * (last - first)


def _beyond_peak(estimate: Estimate) -> int:
    return estimate.required_bytes - estimate.memory.peak_allocated_bytes
