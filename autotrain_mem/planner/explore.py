"""The fastest plan that fits at one level of harm, in few rehearsals.

Best first: of the points that may fit, the one that can be fastest is rehearsed next, and what it shows of memory and
time rules others out. It ends when no point left can be faster than the best that was seen to fit, so nothing is missed
that a whole grid would find, but for what a guess at the border takes for too large; the border is rehearsed as well.
"""

from __future__ import annotations

from dataclasses import replace

from autotrain_mem.planner.border import most_that_fits
from autotrain_mem.planner.guess import LEEWAY, Sight, promise, sights
from autotrain_mem.planner.levels import Level, levels
from autotrain_mem.planner.memo import Memo
from autotrain_mem.planner.points import Line, at, eased, least_demanding, length_line, lines, most_demanding
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Estimate, Knobs

TIE = 0.005
"""Speeds closer than this share are the same: the prediction knows no better, and more headroom is worth more."""

ROUGHLY = 0.1
"""The same for a plan that is only shown beside another."""

LENGTH_TURNS = 6
"""Guesses at a length after the shortest and the one asked for: with these two, at most 8 rehearsals."""

EASING_TURNS = 2
"""Guesses at the rows that are generated at once, after the fewest and those asked for."""


def best_of(space: Space, level: Level, memo: Memo, *, confirmed: bool = True) -> Estimate | None:
    """The plan of one level, or None where nothing on it fits.

    A choice that the whole model overturns makes way for the next: each turn rehearses a point whole that was not.

    Args:
        confirmed: It is to be taken: rehearse the choice and its larger neighbour on the whole model.
    """
    found = _best(space, level, memo, confirmed=confirmed)
    while confirmed and found is not None:
        memo.ask([found.knobs, *_neighbour(space, level, found.knobs)], whole=True)
        before, found = found, _best(space, level, memo, confirmed=True)
        if found is not None and found.knobs == before.knobs:
            break
    return found


def _best(space: Space, level: Level, memo: Memo, *, confirmed: bool) -> Estimate | None:
    if memo.weights_exceed(level.strongest) or not _may_hold(space, level, memo, confirmed=confirmed):
        return None
    if level.lengths:
        return most_that_fits(space, length_line(space, level), memo, turns=LENGTH_TURNS)
    found = _fastest(_Grid(space, level, memo), TIE if confirmed else ROUGHLY)
    return None if found is None else most_that_fits(space, eased(space, found.knobs), memo, turns=EASING_TURNS)


def _may_hold(space: Space, level: Level, memo: Memo, *, confirmed: bool) -> bool:
    """Whether the level's first or last point fits: those with most and with least demand.

    The last alone is asked first where that is likely to settle it: the level before tells what one that offloads needs
    at most, and once weights were beyond the card, others may be as well.
    """
    most, least = most_demanding(space, level), least_demanding(space, level)
    likely_too_large = memo.any_weights_exceed if confirmed else memo.weights_exceed(level.gentlest)
    if level.lengths or level.offloads or likely_too_large:
        return _surely_fits(memo, least)
    memo.ask([most, least] if confirmed else [most])
    return memo(most).fits or not confirmed or _surely_fits(memo, least)


def _surely_fits(memo: Memo, knobs: Knobs) -> bool:
    """A level is not given up for a few bytes on a copy with few layers."""
    estimate = memo(knobs)
    if estimate.fits or estimate.required_bytes > estimate.budget_bytes * LEEWAY:
        return estimate.fits
    memo.ask([knobs], whole=True)
    return memo(knobs).fits


class _Grid:
    """The points of one level, and beside them those of gentler levels, from which much can be concluded."""

    def __init__(self, space: Space, level: Level, memo: Memo) -> None:
        gentler = [each for each in levels(space) if each.harm <= level.harm and not each.lengths]
        self.space = space
        self.memo = memo
        self.own = tuple(lines(space, level))
        self.every = tuple(line for each in gentler for line in lines(space, each))

    def look(self) -> list[Sight]:
        """Returns what is known by now of each of the level's lines."""
        return sights(self.memo, self.own, self.every)


def _fastest(grid: _Grid, tie: float) -> Estimate | None:
    """Rehearses what can be fastest until nothing that is left can be faster: each turn one point that is new."""
    while True:
        seen = grid.look()
        best = _best_known(seen, tie)
        candidate = _most_promising(grid, seen, 0.0 if best is None else best.tokens_per_second * (1 + tie))
        if candidate is None:
            return best
        grid.memo(candidate)


def _best_known(seen: list[Sight], tie: float) -> Estimate | None:
    """The fastest that was seen to fit; of those as fast the one with fewest levers, then with most headroom."""
    fitting = [(number, each) for number, sight in enumerate(seen) for each in sight.known if each.fits]
    fastest = max((each.tokens_per_second for _, each in fitting), default=0.0)
    tied = [(number, each) for number, each in fitting if each.tokens_per_second >= fastest * (1 - tie)]
    return min(tied, key=lambda pair: (pair[0], pair[1].required_bytes), default=(0, None))[1]


def _most_promising(grid: _Grid, seen: list[Sight], beyond: float) -> Knobs | None:
    """The point that is likely to be fastest of those that may fit; None where none can beat the best."""
    promises = [
        (made, -number) for number, sight in enumerate(seen) if (made := promise(grid.memo, grid.space, sight, beyond))
    ]
    best = max(promises, key=lambda pair: (pair[0].expected, pair[1]), default=None)
    return None if best is None else best[0].knobs


def _neighbour(space: Space, level: Level, knobs: Knobs) -> list[Knobs]:
    """The next more demanding point of the line that a plan is on, where there is one."""
    grid = [length_line(space, level)] if level.lengths else lines(space, level)
    line: Line = next((line for line in grid if _is_on(line, knobs)), ())
    return [each for each in line if _demand(each) > _demand(knobs)][:1]


def _is_on(line: Line, knobs: Knobs) -> bool:
    """Whatever kind of segments was chosen, and however many completions are generated at once."""
    alike = replace(
        at(knobs, line[0]),
        gradient_checkpointing=knobs.gradient_checkpointing,
        expandable_segments=line[0].expandable_segments,
        max_length=line[0].max_length,
    )
    return alike == line[0]


def _demand(knobs: Knobs) -> tuple[int, float]:
    """Grows along a line."""
    return knobs.per_device_train_batch_size, float("inf") if knobs.max_length is None else knobs.max_length
