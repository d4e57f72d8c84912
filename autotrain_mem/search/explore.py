"""The fastest plan that fits at one level of harm, in few rehearsals.

Best first: of the points that may fit, the one that can be fastest is rehearsed next, and what it shows of memory and
time rules others out. It ends when no point left can be faster than the best that was seen to fit, so nothing is missed
that a whole grid would find, but for what a guess at the border takes for too large; the border is rehearsed as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from autotrain_mem.search.guess import LEEWAY, between, may_fit, may_fit_at_once, promise
from autotrain_mem.search.levels import Level, allowed, levels
from autotrain_mem.search.memo import Line, Memo, Sight, sights
from autotrain_mem.search.shardings import least_shared, shared
from autotrain_mem.search.space import Space, micro_batches, with_rows
from autotrain_mem.settings.levers import FREE, LADDER, LEVERS, taken_back
from autotrain_mem.types import Estimate, Knobs, Owner, Phase
from autotrain_mem.types.methods_table import METHODS

TIE = 0.005
"""Speeds closer than this share are the same: the prediction knows no better, and more headroom is worth more."""

ROUGHLY = 0.1
"""The same for a plan that is only shown beside another."""

MIDDLE_EVERY = 3
"""Each third guess is the middle of what is left, so that a curve that misleads the slope costs at most three times
what plain bisection would."""

LENGTH_TURNS = 6
"""Guesses at a length after the shortest and the one asked for: with these two, at most 8 rehearsals."""

EASING_TURNS = 2
"""Guesses at the rows that are generated at once, after the fewest and those asked for."""


def best_of(
    space: Space,
    level: Level,
    memo: Memo,
    *,
    confirmed: bool = True,
    meanwhile: Callable[[Estimate], object] = lambda choice: None,
) -> Estimate | None:
    """The plan of one level, or None where nothing on it fits.

    A choice that the whole model overturns, or rows of every length over a run, makes way for the next: each turn
    rehearses a point whole that was not.
    Where an adapter that the level turns on is too large, a smaller one is taken: the largest that should fit.

    Args:
        confirmed: It is to be taken: rehearse the choice on the whole model, and what is beside it as far as few layers
            may be wrong about it.
        meanwhile: What else needs to be asked if the choice stays, while it is rehearsed.
    """
    found = _best(space, level, memo, confirmed=confirmed)
    while confirmed and found is not None:
        memo.foresee(found.knobs)
        around = [*_neighbour(space, level, found.knobs), *_simpler(space, level, memo, found.knobs)]
        memo.ask(around)
        meanwhile(found)
        memo.ask([found.knobs, *(each for each in around if _nearly_fits(memo(each)))], whole=True)
        memo.over_steps(found.knobs)
        before, found = found, _best(space, level, memo, confirmed=True)
        if found is not None and found.knobs == before.knobs:
            break
    smaller = _of_smaller_rank(space, level, memo) if found is None else None
    return found if smaller is None else best_of(space, smaller, memo, confirmed=confirmed, meanwhile=meanwhile)


def _nearly_fits(estimate: Estimate) -> bool:
    """Whether copies with few layers may be wrong that a point does not fit."""
    return not estimate.fits and estimate.required_bytes <= estimate.budget_bytes * LEEWAY


def _of_smaller_rank(space: Space, level: Level, memo: Memo) -> Level | None:
    """The level with the largest adapter for which its least demanding point should fit; None where none is left.

    Weights, gradients and optimizer state of an adapter grow as its rank does, and what is reserved grows with them.
    """
    floor = next(iter(memo.known([least_demanding(space, level)])), None)
    if not level.ranks or floor is None or floor.fits:
        return None
    excess, kept = floor.required_bytes - floor.budget_bytes, floor.reserved
    adapter = adapter_bytes(floor) * kept.peak_reserved_bytes / max(1, kept.peak_allocated_bytes)
    saves = (rank for rank in level.ranks if adapter * (1 - rank / floor.knobs.lora_r) >= excess)
    rank = next(saves, None)
    return None if rank is None else level.of_rank(rank)


def adapter_bytes(estimate: Estimate) -> int:
    """Sums what the adapter takes of an estimate with LoRA: weights, as much of gradients, and optimizer state."""
    trained = estimate.memory.trained
    if trained is None:
        return 0
    return 2 * trained.bytes + estimate.memory.owners_at_peak.get(Owner.OPTIMIZER_STATE, 0)


def _simpler(space: Space, level: Level, memo: Memo, knobs: Knobs) -> list[Knobs]:
    """The points of the level that lack one of the levers of a choice, as far as they were not rehearsed and may fit.

    Nothing that is left can be faster than the choice; one that is as fast takes its place.
    """
    every = tuple(lines(space, level))
    simpler = [taken_back(row, knobs, space.base) for row in LADDER]
    return [
        each
        for each in simpler
        if each is not None
        for line in every
        if each in line and may_fit(memo, space, line, every, each)
    ]


def _best(space: Space, level: Level, memo: Memo, *, confirmed: bool) -> Estimate | None:
    if memo.weights_exceed(least_demanding(space, level)) or not _may_hold(space, level, memo, confirmed=confirmed):
        return None
    if level.lengths:
        return longest_rows(space, level, memo, turns=LENGTH_TURNS)
    found = _fastest(space, level, memo, TIE if confirmed else ROUGHLY)
    return None if found is None else _eased(space, level, memo, found)


def _eased(space: Space, level: Level, memo: Memo, found: Estimate) -> Estimate | None:
    """The fastest with as many rows generated at once as fit: of a small micro-batch few are until then, which says
    nothing of its training. To generate as many takes each setting as long."""
    best = most_that_fits(space, eased(space, found.knobs), memo, turns=EASING_TURNS)
    if best is None or best.knobs == found.knobs:
        return best
    for other in (each for line in lines(space, level) for each in memo.known(line) if each.fits):
        seconds = _seconds(other, training=True) + _seconds(best, training=False)
        if other.time.tokens / seconds > best.tokens_per_second * (1 + TIE):
            rival = most_that_fits(space, eased(space, other.knobs), memo, turns=EASING_TURNS)
            best = best if rival is None else max(best, rival, key=lambda each: each.tokens_per_second)
    return best


def _seconds(estimate: Estimate, *, training: bool) -> float:
    """Sums up the seconds of a step in which completions are trained on, or those in which they are made and judged."""
    phases = estimate.time.phases.items()
    return sum(seconds for phase, seconds in phases if (phase not in (Phase.GENERATE, Phase.SCORE)) is training)


def _may_hold(space: Space, level: Level, memo: Memo, *, confirmed: bool) -> bool:
    """Whether the level's first or last point fits: those with most and with least demand. A plan that is only shown is
    looked for by what is known of others.

    The last alone is asked first where that is likely to settle it: the level before tells what one that offloads needs
    at most, and once weights were beyond the card, others may be as well. Once a run's mixed lengths were looked at, it
    may be the last that does not fit, and another point that does; and so may the one that accumulates no gradients.
    """
    most, least = most_demanding(space, level), least_demanding(space, level)
    likely_too_large = memo.any_weights_exceed if confirmed else memo.weights_exceed(most)
    if not (level.lengths or level.offloads or likely_too_large):
        if not confirmed:
            return True
        memo.ask([most, least])
        if memo(most).fits:
            return True
    if surely_fits(memo, least):
        return True
    any_fits = any(each.fits for line in lines(space, level) for each in memo.known(line))
    return any_fits or fits_at_once(space, level, memo)


def fits_at_once(space: Space, level: Level, memo: Memo) -> bool:
    """Whether the whole batch at once fits where the fewest rows at once do not; rehearsed only where it may."""
    at_once = unaccumulated(space, level)
    return may_fit_at_once(space, memo(least_demanding(space, level)), at_once) and surely_fits(memo, at_once)


def surely_fits(memo: Memo, knobs: Knobs) -> bool:
    """A level is not given up for a few bytes on a copy with few layers."""
    if _nearly_fits(memo(knobs)):
        memo.ask([knobs], whole=True)
    return memo(knobs).fits


def _fastest(space: Space, level: Level, memo: Memo, tie: float) -> Estimate | None:
    """Rehearses what can be fastest until nothing that is left can be faster: each turn one point that is new.

    Beside the level's lines those of gentler levels are looked at, from which much can be concluded.
    """
    gentler = [each for each in levels(space) if each.harm <= level.harm and not each.lengths]
    own, every = tuple(lines(space, level)), tuple(line for each in gentler for line in lines(space, each))
    while True:
        seen = sights(memo, own, every)
        best = _best_known(seen, tie)
        beyond = 0.0 if best is None else best.tokens_per_second * (1 + tie)
        promises = [(number, promise(memo, space, sight, beyond)) for number, sight in enumerate(seen)]
        likely = [(each.expected, -number, each.knobs) for number, each in promises if each is not None]
        if not likely:
            return best
        memo(max(likely)[2])


def _best_known(seen: list[Sight], tie: float) -> Estimate | None:
    """The fastest that was seen to fit; of those as fast the one with fewest levers, then with most headroom."""
    fitting = [(number, each) for number, sight in enumerate(seen) for each in sight.known if each.fits]
    fastest = max((each.tokens_per_second for _, each in fitting), default=0.0)
    tied = [(number, each) for number, each in fitting if each.tokens_per_second >= fastest * (1 - tie)]
    return min(tied, key=lambda pair: (pair[0], pair[1].required_bytes), default=(0, None))[1]


def _neighbour(space: Space, level: Level, knobs: Knobs) -> list[Knobs]:
    """The next more demanding point of the line that a plan is on, where there is one: whatever kind of segments was
    chosen, and however many completions are generated at once."""
    rows, checkpointing = knobs.per_device_train_batch_size, knobs.gradient_checkpointing
    shortened = (each for each in length_lines(space, level) if each[0].per_device_train_batch_size == rows)
    for line in shortened if level.lengths else lines(space, level):
        alike = replace(at(knobs, line[0]), gradient_checkpointing=checkpointing, max_length=line[0].max_length)
        if alike.growing(False) == line[0].growing(False):
            return [each for each in line if _demand(each) > _demand(knobs)][:1]
    return []


def _demand(knobs: Knobs) -> tuple[int, float]:
    """Grows along a line."""
    return knobs.per_device_train_batch_size, float("inf") if knobs.max_length is None else knobs.max_length


def longest_rows(space: Space, level: Level, memo: Memo, *, turns: int) -> Estimate | None:
    """The longest rows that fit on a level that shortens them; None where not even the shortest do.

    One at once needs least as long as what is accumulated is small; beyond its border the whole batch at once may fit.
    """
    least, at_once = length_lines(space, level)
    best = most_that_fits(space, least, memo, turns=turns)
    longer = [each for each in at_once if best is None or _demand(each)[1] > _demand(best.knobs)[1]]
    if not longer or at_once == least or not may_fit_at_once(space, best or memo(least[0]), longer[0]):
        return best
    return most_that_fits(space, longer, memo, turns=turns) or best


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
    turn, beyond = 0, high
    while high - low > 1 and turn != turns:
        turn += 1
        sides = [memo(points[side]) for side in dict.fromkeys((low, high, beyond))]
        guess = (low + high) // 2 if turn % MIDDLE_EVERY == 0 else _guess(space, points, low, high, sides)
        low, high, beyond = (guess, high, beyond) if memo(points[guess]).fits else (low, guess, high)
    return memo(points[low])


def _guess(space: Space, points: Sequence[Knobs], low: int, high: int, known: Sequence[Estimate]) -> int:
    """The last point between two rehearsed ones that a slope says would fit, or else the one next to ``low``.

    Without accumulation a phase is bent: few tokens peak where all gradients are there, many where none are yet. Then a
    line between both sides is above it, and one through two points that do not fit is not.

    Args:
        known: Of ``low``, of ``high``, and of what was rehearsed beyond, if anything was.
    """
    pairs, budget_bytes = list(pairwise(known)), known[0].budget_bytes
    fitting = (
        each
        for each in range(high - 1, low, -1)
        if any(between(space, points[each], *pair) <= budget_bytes for pair in pairs)
    )
    return next(fitting, low + 1)


# -- the points of a level ---------------------------------------------------------------------------------------------


def checkpointing_choices(space: Space) -> tuple[bool, ...]:
    """Values that gradient_checkpointing may take, the fastest first. Turning it off is no harm, so never forbidden."""
    lever = LEVERS["gradient_checkpointing"]
    if space.pinned.intersection(lever.knobs) or not lever.suits(METHODS[space.method]):
        return (space.base.gradient_checkpointing,)
    return (False,) if lever.name in space.forbid else (False, True)


def lines(space: Space, level: Level) -> Iterator[Line]:
    """Every line of a level, fewest levers of time first."""
    for setting in level.settings:
        for way in shared(space, setting):
            for checkpointing in checkpointing_choices(space):
                yield line(space, way, checkpointing=checkpointing)


@lru_cache(maxsize=256)  # as many as one search has
def line(space: Space, setting: Knobs, *, checkpointing: bool) -> Line:
    """One setting at every micro-batch allowed."""
    lever = LEVERS["micro_batch"]
    fixed = lever.name in space.forbid or not lever.suits(METHODS[space.method])
    smallest = space.base.per_device_train_batch_size if fixed else 1
    chosen = replace(setting, gradient_checkpointing=checkpointing)

    def at_rows(rows: int) -> Knobs:
        """The other batches follow the micro-batch where they may."""
        levers = ("eval_batch", *(["rollout_batch"] if rows < space.share else []))
        following = [name for lever in levers for name in _following(space, lever)]
        return replace(with_rows(chosen, rows), **{name: min(getattr(space.base, name), rows) for name in following})

    return tuple(at_rows(rows) for rows in micro_batches(space)[::-1] if rows >= smallest)


def _following(space: Space, lever: str) -> tuple[str, ...]:
    """The lever's knobs, where the job has them and they may move."""
    row = LEVERS[lever]
    return tuple(name for name in row.knobs if allowed(row, space) and getattr(space.base, name) is not None)


def eased(space: Space, point: Knobs) -> tuple[Knobs, ...]:
    """The point itself, then with twice, four times ... the rows generated at once, and last with those asked for.

    Example: 2 rows of a rollout of 16, where TRL's default is 64: 2, 4, 8, and 64, which is the whole rollout.
    """
    points = [point]
    for name in _following(space, "rollout_batch"):
        asked, rows = getattr(space.base, name), getattr(point, name)
        while rows < asked:
            rows = 2 * rows if 2 * rows < min(asked, space.share) else asked
            points.append(replace(point, **{name: rows}))
    return tuple(points)


def least_demanding(space: Space, level: Level) -> Knobs:
    """The point of a level that needs least; if that does not fit, nothing on the level does, unless it be
    :func:`unaccumulated`."""
    smallest = _least_line(space, level)[0]
    return replace(smallest, max_length=level.lengths[0]) if level.lengths else smallest


def unaccumulated(space: Space, level: Level) -> Knobs:
    """The same in one micro-batch: it holds more activations and, until its backward pass makes them, no gradients."""
    whole = _least_line(space, level)[-1]
    return replace(whole, max_length=level.lengths[0]) if level.lengths else whole


def floors_of(space: Space, level: Level) -> tuple[Knobs, Knobs]:
    """Both of them: one needs the least of the level."""
    return least_demanding(space, level), unaccumulated(space, level)


def _least_line(space: Space, level: Level) -> Line:
    setting = least_shared(space, level.strongest)
    return line(space, setting, checkpointing=checkpointing_choices(space)[-1])


def most_demanding(space: Space, level: Level) -> Knobs:
    """The point of a level with the fewest levers and the most rows at once; if it fits, there is little to search.

    Of several processes that with the smallest shards: it tells what larger ones and whole models need.
    """
    return line(space, least_shared(space, level.gentlest), checkpointing=checkpointing_choices(space)[0])[-1]


def length_lines(space: Space, level: Level) -> tuple[Line, Line]:
    """The least demanding point of a level that shortens rows, at every length, and last at the length asked for; and
    the same of the whole batch at once."""
    lengths = (*level.lengths, level.strongest.max_length)
    least, at_once = (
        tuple(replace(shortest, max_length=length) for length in lengths)
        for shortest in (least_demanding(space, level), unaccumulated(space, level))
    )
    return least, at_once


def at(setting: Knobs, point: Knobs) -> Knobs:
    """A setting with the batches and checkpointing of another point; its processes share the model as they did."""
    free = (name for lever in FREE for name in LEVERS[lever].knobs)
    return replace(setting, **{name: getattr(point, name) for name in free})
