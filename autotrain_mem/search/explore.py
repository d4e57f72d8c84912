"""Finds the fastest plan that fits at one level of harm, in few rehearsals.

The search is best-first: of the points that may fit, the one that may be fastest is rehearsed next, and its memory and
time rule others out. It ends when no remaining point can be faster than the best that fits. It finds what a full grid
would find, unless a guess wrongly rules a point out as too large; points at the border are rehearsed as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from autotrain_mem.search.guess import LEEWAY, between, holds_too_much, may_fit, may_fit_at_once, promise
from autotrain_mem.search.levels import Level, eased, levels
from autotrain_mem.search.memo import Memo, sights
from autotrain_mem.search.space import Space
from autotrain_mem.settings.levers import FREE, LADDER, LEVERS, taken_back
from autotrain_mem.types import Estimate, Knobs, Owner, Phase

TIE = 0.005
"""Speeds that differ by less than this share count as equal: predictions are less precise. Headroom then decides."""

ROUGHLY = 0.1
"""Like :data:`TIE`, for a plan that is only shown as an alternative."""

MIDDLE_EVERY = 3
"""Every third guess is the middle, so that misleading guesses cost at most three times as much as bisection."""

LENGTH_TURNS = 6
"""The most guesses at a length after the shortest and the requested one."""

EASING_TURNS = 2
"""The most guesses at the number of rows generated at once, after the smallest and the requested one."""


def best_of(
    level: Level, memo: Memo, *, confirmed: bool = True, meanwhile: Callable[[Estimate], object] = lambda choice: None
) -> Estimate | None:
    """Returns the plan of one level, or None if nothing on it fits.

    If a rehearsal of the whole model, or a run with rows of mixed lengths, rules the choice out, the next one is tried.
    If an adapter that the level turns on is too large, the largest rank that should fit is taken, and if that of
    experts is too large at any rank, an adapter on layers alone. ``confirmed``:
    whether to rehearse the choice on the whole model, with those neighbours that nearly fit. ``meanwhile``: called with
    the choice before it is confirmed, to rehearse the points that it is compared with."""
    found = _best(level, memo, confirmed=confirmed)
    while confirmed and found is not None:
        memo.foresee([found.knobs], whole=True)
        around = _around(level, memo, found.knobs)
        memo.ask(around)
        meanwhile(found)
        memo.ask([found.knobs, *(each for each in around if _nearly_fits(memo(each)))], whole=True)
        memo.over_steps(found.knobs)
        before, found = found, _best(level, memo, confirmed=True)
        if found is not None and found.knobs == before.knobs:
            break
    floor = next(iter(memo.known([level.least])), None)
    if found is not None or floor is None or floor.fits:
        return found
    # An adapter's weights, gradients and optimizer state are proportional to its rank.
    excess, kept, trained = floor.required_bytes - floor.budget_bytes, floor.reserved, floor.memory.trained
    state = floor.memory.owners_at_peak.get(Owner.OPTIMIZER_STATE, 0)
    held = 0 if trained is None else 2 * trained.bytes + state
    adapter = held * kept.peak_reserved_bytes / max(1, kept.peak_allocated_bytes)
    saves = (rank for rank in level.ranks if adapter * (1 - rank / floor.knobs.lora_r) >= excess)
    rank = next(saves, None)
    smaller = level.on_layers() if rank is None else level.of_rank(rank)
    return None if smaller is None else best_of(smaller, memo, confirmed=confirmed, meanwhile=meanwhile)


def _nearly_fits(estimate: Estimate) -> bool:
    """Returns whether a point may fit after all, within the error of copies with few layers."""
    return not estimate.fits and estimate.required_bytes <= estimate.budget_bytes * LEEWAY


def _around(level: Level, memo: Memo, knobs: Knobs) -> list[Knobs]:
    """Returns the next larger point on the choice's line, and points that lack one of its levers and may fit."""
    around = []
    rows, checkpointing = knobs.per_device_train_batch_size, knobs.gradient_checkpointing
    shortened = (each for each in level.at_every_length if each[0].per_device_train_batch_size == rows)
    for line in shortened if level.lengths else level.lines:
        # Neither the kind of segments nor the completions generated at once identify a line.
        alike = replace(at(knobs, line[0]), gradient_checkpointing=checkpointing, max_length=line[0].max_length)
        if alike.growing(False) == line[0].growing(False):
            around = [each for each in line if _demand(each) > _demand(knobs)][:1]
            break
    every = level.lines
    for row in LADDER:
        if simpler := taken_back(row, knobs, level.space.base):
            on = sights(memo, [line for line in every if simpler in line], every)
            around += [simpler for sight in on if simpler in may_fit(level.space, sight)]
    return around


def _demand(knobs: Knobs) -> tuple[int, float]:
    """Returns a key that grows along a line: rows, then length."""
    return knobs.per_device_train_batch_size, float("inf") if knobs.max_length is None else knobs.max_length


def _best(level: Level, memo: Memo, *, confirmed: bool) -> Estimate | None:
    if memo.weights_exceed(level.least) or not _may_hold(level, memo, confirmed=confirmed):
        return None
    if level.lengths:
        return longest_rows(level, memo, turns=LENGTH_TURNS)
    if (found := _fastest(level, memo, TIE if confirmed else ROUGHLY)) is None:
        return None
    # Generate as many rows at once as fit: the time of generation then hardly depends on the micro-batch.
    best = most_that_fits(level.space, eased(level.space, found.knobs), memo, turns=EASING_TURNS)
    if best is None or best.knobs == found.knobs:
        return best
    for other in (each for line in level.lines for each in memo.known(line) if each.fits):
        seconds = _seconds(other, training=True) + _seconds(best, training=False)
        if other.time.tokens / seconds > best.tokens_per_second * (1 + TIE):
            rival = most_that_fits(level.space, eased(level.space, other.knobs), memo, turns=EASING_TURNS)
            best = best if rival is None else max(best, rival, key=lambda each: each.tokens_per_second)
    return best


def _seconds(estimate: Estimate, *, training: bool) -> float:
    """Sums up a step's seconds of training on completions, or of generating and scoring them."""
    phases = estimate.time.phases.items()
    return sum(seconds for phase, seconds in phases if (phase not in (Phase.GENERATE, Phase.SCORE)) is training)


def _may_hold(level: Level, memo: Memo, *, confirmed: bool) -> bool:
    """Returns whether anything on the level may fit, by its most and least demanding points.

    If the least demanding point likely decides, only that one is rehearsed. If it does not fit, another known point may
    fit (mixed lengths can make the least demanding one too large), or the point that accumulates no gradients.
    """
    most, least = level.most, level.least
    likely_too_large = memo.any_weights_exceed if confirmed else memo.weights_exceed(most)
    if not (level.lengths or level.offloads or likely_too_large or memo.predictor.exceeds(most)):
        if not confirmed:
            return True
        memo.ask([most, least])
    elif not level.offloads:
        following = [each.least for own, each in pairwise(levels(level.space)) if own.name == level.name]
        memo.foresee([least, *following], whole=False)
    if surely_fits(memo, least):
        return True
    any_fits = any(each.fits for line in level.lines for each in memo.known(line))
    return any_fits or fits_at_once(level, memo)


def fits_at_once(level: Level, memo: Memo) -> bool:
    """Returns whether the whole batch in one micro-batch fits; rehearses it only if that is likely."""
    return may_fit_at_once(level.space, memo(level.least), level.at_once) and surely_fits(memo, level.at_once)


def surely_fits(memo: Memo, knobs: Knobs) -> bool:
    """Returns whether a point fits; rehearses a near miss on the whole model."""
    if _nearly_fits(memo(knobs)):
        memo.ask([knobs], whole=True)
    return memo(knobs).fits


def _fastest(level: Level, memo: Memo, tie: float) -> Estimate | None:
    gentler = [each for each in levels(level.space) if each.harm <= level.harm and not each.lengths]
    every = tuple(line for each in gentler for line in each.lines)
    own = tuple(line for line in level.lines if not memo.predictor.exceeds(line[0])) or level.lines
    while True:
        seen = sights(memo, [line for line in own if not holds_too_much(memo, line[0])], every)
        # The fastest that fits; of equals the one with fewest levers, then with most headroom.
        fitting = [(number, each) for number, sight in enumerate(seen) for each in sight.known if each.fits]
        fastest = max((each.tokens_per_second for _, each in fitting), default=0.0)
        tied = [(number, each) for number, each in fitting if each.tokens_per_second >= fastest * (1 - tie)]
        best = min(tied, key=lambda pair: (pair[0], pair[1].required_bytes), default=(0, None))[1]
        beyond = 0.0 if best is None else best.tokens_per_second * (1 + tie)
        promises = [(number, promise(memo, level.space, sight, beyond)) for number, sight in enumerate(seen)]
        likely = sorted((each.expected, -number, each.knobs) for number, each in promises if each is not None)
        if not likely:
            return best
        # A line without a rehearsal needs one to be ruled out, unless the plan is only an alternative. Levels that are
        # too large are shown beside the plan.
        unseen = [knobs for _, number, knobs in reversed(likely[:-1]) if tie == TIE and not seen[-number].known]
        too_large = [each.least for each in gentler if memo.predictor.exceeds(each.least)]
        memo.foresee([likely[-1][2], *unseen[:1], *too_large, *unseen[1:]], whole=False)
        memo(likely[-1][2])


def longest_rows(level: Level, memo: Memo, *, turns: int) -> Estimate | None:
    """Returns the longest rows that fit on a level that shortens them; None if not even the shortest fit. One row at a
    time needs least. Longer rows may fit with the whole batch at once, which accumulates no gradients."""
    least, at_once = level.at_every_length
    best = most_that_fits(level.space, least, memo, turns=turns)
    longer = [each for each in at_once if best is None or _demand(each)[1] > _demand(best.knobs)[1]]
    if not longer or at_once == least or not may_fit_at_once(level.space, best or memo(least[0]), longer[0]):
        return best
    return most_that_fits(level.space, longer, memo, turns=turns) or best


def most_that_fits(space: Space, points: Sequence[Knobs], memo: Memo, *, turns: int | None = None) -> Estimate | None:
    """Returns the last point that fits, and rehearses the next one, which does not; None if the first does not fit.

    Peak memory is nearly linear in the tokens of a micro-batch, so the first and the last point give a slope, and the
    third rehearsal is near the border: of 1, 2, 4, 8 rows with a border at 4 it rehearses 1, 8, then 4. The point
    without accumulation bends the curve. A line between both sides of the border then overestimates, but a line through
    two points that do not fit does not, so the lower of both counts. ``points``: ordered by demand, not empty.
    ``turns``: the most guesses after the first and last point."""
    low, high = 0, len(points) - 1
    if not memo(points[low]).fits:
        return None
    if memo(points[high]).fits:
        return memo(points[high])
    turn, beyond = 0, high
    while high - low > 1 and turn != turns:
        turn += 1
        guess = (low + high) // 2
        if turn % MIDDLE_EVERY:
            pairs = list(pairwise(memo(points[side]) for side in dict.fromkeys((low, high, beyond))))
            budget_bytes = pairs[0][0].budget_bytes
            guess = high - 1
            while guess > low + 1 and all(between(space, points[guess], *pair) > budget_bytes for pair in pairs):
                guess -= 1
        low, high, beyond = (guess, high, beyond) if memo(points[guess]).fits else (low, guess, high)
    return memo(points[low])


def at(setting: Knobs, point: Knobs) -> Knobs:
    """Returns a setting with the batches and checkpointing of another point."""
    free = (name for lever in FREE for name in LEVERS[lever].knobs)
    return replace(setting, **{name: getattr(point, name) for name in free})
