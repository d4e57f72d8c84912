"""Climb the ladder until something fits, and take the fastest of what does least harm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotrain_mem.planner.border import most_that_fits
from autotrain_mem.planner.changes import changes
from autotrain_mem.planner.ladder import EXPANDABLE, LEVERS, Rung, allowed, rungs
from autotrain_mem.planner.memo import Memo, Predict, Told
from autotrain_mem.planner.nearest import does_not_fit
from autotrain_mem.planner.points import (
    at,
    checkpointing_choices,
    eased,
    least_demanding,
    length_line,
    line,
    relative_cost,
)
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Attempt, Estimate, Knobs, Lever

LENGTH_TURNS = 6
"""Guesses at a length after the shortest and the one asked for: with these two, at most 8 rehearsals."""

EASING_TURNS = 2
"""Guesses at the rows that are generated at once, after the fewest and those asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Settings that were rehearsed and fit, what they change, and everything that was tried."""

    estimate: Estimate
    attempts: tuple[Attempt, ...]
    levers: tuple[Lever, ...]


def search(space: Space, predict: Predict, told: Told = lambda attempt: None) -> Found:
    """The fastest plan at the first harm level at which anything fits.

    Example: an effective batch of 8 where 4 rows fit without checkpointing. Rehearsed are 1 row with it (fits), then
    without it 1 row (fits), 8 rows (do not) and 4 (fit): the plan is 4 x 2 without checkpointing, in 4 rehearsals.

    Args:
        told: Hears of every configuration as it has been rehearsed.

    Raises:
        DoesNotFitError: no allowed point fits; the error names the nearest one that does.
        UsageError: ``space.forbid`` names an unknown lever.
    """
    memo = Memo(predict, may_expand=allowed(LEVERS[EXPANDABLE], space), told=told)
    for rung in rungs(space):
        found = None if memo.weights_exceed(rung.strongest) else _best(space, rung, memo)
        if found is not None:
            found = most_that_fits(space, eased(space, found.knobs), memo, turns=EASING_TURNS) or found
            levers = changes(space, found.knobs, memo)
            return Found(estimate=found, attempts=memo.attempts, levers=levers)
    raise does_not_fit(space, memo)


def _best(space: Space, rung: Rung, memo: Memo) -> Estimate | None:
    """The fastest point of a rung that fits, with as few of the rung's levers as that speed needs."""
    if rung.lengths:
        return most_that_fits(space, length_line(space, rung), memo, turns=LENGTH_TURNS)
    _, *gentler = rung.settings
    fastest = _fastest(space, rung, memo)
    if fastest is None:
        return None
    tried = (memo(at(setting, fastest.knobs)) for setting in gentler)
    return next((estimate for estimate in tried if estimate.fits), fastest)


def _fastest(space: Space, rung: Rung, memo: Memo) -> Estimate | None:
    """The cheapest point of the rung's strongest setting. One rehearsal if nothing fits."""
    best = memo(least_demanding(space, rung))
    if not best.fits:
        return None
    for checkpointing in checkpointing_choices(space):
        points = line(space, rung.strongest, checkpointing=checkpointing)
        best = _faster(space, points, best, memo) or best
    return best


def _faster(space: Space, points: Sequence[Knobs], best: Estimate, memo: Memo) -> Estimate | None:
    """The largest micro-batch of a line that fits, if it costs less than the best so far."""
    faster = [knobs for knobs in points if relative_cost(space, knobs) < relative_cost(space, best.knobs)]
    return most_that_fits(space, faster, memo) if faster else None
