"""Climb the levels of harm until one holds a plan, and take the fastest of that level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from autotrain_mem.search.changes import changes
from autotrain_mem.search.explore import TIE, best_of, floors_of, least_demanding
from autotrain_mem.search.levels import Level, allowed, levels
from autotrain_mem.search.memo import Memo, OnAttempt, Predictor, candidate
from autotrain_mem.search.nearest import does_not_fit
from autotrain_mem.search.space import Space
from autotrain_mem.settings.levers import EXPANDABLE, LEVERS
from autotrain_mem.support.errors import PlanError
from autotrain_mem.types import Candidate, Estimate, Harm, Knobs, Lever
from autotrain_mem.types.gpu_comparison import Most


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Settings that were rehearsed and fit, what they change, and everything that was tried."""

    level: str
    estimate: Estimate
    attempts: tuple[Candidate, ...]
    levers: tuple[Lever, ...]
    alternatives: tuple[Candidate, ...]
    """Of the levels around: those of less harm that do not fit or are too slow, and the next one, least harm first."""
    most: Most | None = None
    """Where as much as fits of one thing was asked for."""


class Limits(Protocol):
    """A limit of a plan beside its memory budget, such as a deadline."""

    def keeps(self, estimate: Estimate) -> bool:
        """Returns whether a plan that fits may be taken."""

    def broken(self, fitting: Sequence[Estimate]) -> PlanError:
        """Returns the error for a search in which this much fits, and none of it may be taken."""


class _NoLimits:
    """Accepts every plan that fits."""

    def keeps(self, estimate: Estimate) -> bool:
        return True

    def broken(self, fitting: Sequence[Estimate]) -> PlanError:
        raise AssertionError("what fits may be taken")


NO_LIMITS: Limits = _NoLimits()


def search(
    space: Space,
    predictor: Predictor,
    on_attempt: OnAttempt = lambda attempt: None,
    limits: Limits = NO_LIMITS,
) -> Found:
    """The fastest plan at the first level of harm at which anything fits, unless the next is far faster.

    Example: an effective batch of 8 where 4 rows fit without checkpointing. Rehearsed are 8 rows without checkpointing
    (do not fit) and 1 row with it (fits), then 4 rows without it (fit), which nothing else can beat: three rehearsals,
    and those of the next level.

    Args:
        on_attempt: Hears of every configuration as it has been rehearsed.
        limits: What its plan keeps: a level whose fastest plan does not is passed over.

    Raises:
        DoesNotFitError: no allowed point fits; the error names the nearest one that does.
        UsageError: ``space.forbid`` names an unknown lever.
        PlanError: what fits does not keep the limits (``limits.broken``).
    """
    memo = make_memo(space, predictor, on_attempt)
    plan = climb(space, memo, limits)
    if plan is None:
        raise no_plan(space, memo, limits)
    return plan


def no_plan(space: Space, memo: Memo, limits: Limits) -> PlanError:
    """The error for a search that found nothing that may be taken; rehearses a few points more to find a way out."""
    fitting = [estimate for estimate in memo.estimates if estimate.fits]
    return limits.broken(fitting) if fitting else does_not_fit(space, memo)


def find(
    space: Space,
    predictor: Predictor,
    on_attempt: OnAttempt = lambda attempt: None,
    limits: Limits = NO_LIMITS,
) -> Found | None:
    """The same, and None where nothing allowed fits and keeps the limits: no rehearsal goes into what would."""
    return climb(space, make_memo(space, predictor, on_attempt), limits)


def make_memo(space: Space, predictor: Predictor, on_attempt: OnAttempt) -> Memo:
    """The memory of one search."""
    return Memo(predictor, may_expand=allowed(LEVERS[EXPANDABLE], space), on_attempt=on_attempt)


def climb(space: Space, memo: Memo, limits: Limits) -> Found | None:
    """The plan of the first level that holds one, and what stands around it; None where none does.

    Levels that are too large by the number of parameters alone are asked last, while the choice is confirmed: should
    one of them fit after all, it is climbed as if nothing had been known.
    """
    every = levels(space)
    floors = {level.name: least_demanding(space, level) for level in every}
    too_large = {name: floor for name, floor in floors.items() if memo.exceeds(floor)}
    found = _climb(space, memo, limits, every, too_large)
    if any(estimate.fits for estimate in memo.known([*too_large.values()])):
        return _climb(space, memo, limits, every, {})
    return found


def _climb(
    space: Space, memo: Memo, limits: Limits, every: tuple[Level, ...], too_large: Mapping[str, Knobs]
) -> Found | None:
    passed: dict[str, Estimate] = {}
    """Level -> its best, which is too slow or keeps no limit, or the least that it needs."""
    for number, level in enumerate(every):
        if level.name in too_large:
            continue
        if any(each.fits and (level.lengths or (level.loses and limits.keeps(each))) for each in passed.values()):
            break  # rows are cut and updates lost to fit, never to be done sooner
        before, after = every[:number], every[number + 1 :]
        larger = [too_large[each.name] for each in before if each.name in too_large]
        best = best_of(space, level, memo, meanwhile=partial(_look_around, space, level, larger, after, memo))
        passed |= _floors(space, every[: number + (best is None)], memo, passed)
        if best is None:
            continue
        if not limits.keeps(best):
            passed[level.name] = best
            continue
        if again := _faster_by_now(space, before, best, memo, limits, passed):
            return _found(space, memo, again, {name: each for name, each in passed.items() if name != again[0]}, {})
        following = _next_level(space, after, memo) if _is_compared(space, level, best) else {}
        if all(slowdown(best, other) <= space.max_slowdown for other in following.values()):
            return _found(space, memo, (level.name, best), passed, following)
        passed[level.name] = best
    fitting = [name for name, estimate in passed.items() if estimate.fits and limits.keeps(estimate)]
    if not fitting:
        return None
    chosen = (fitting[-1], passed.pop(fitting[-1]))
    return _found(space, memo, chosen, passed, {})


def _floors(space: Space, before: tuple[Level, ...], memo: Memo, passed: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """Finds what the levels that hold no plan need at least; not of those where no rehearsal was needed to know."""
    floors = [(level.name, memo.known(floors_of(space, level))) for level in before if level.name not in passed]
    least = {name: min(known, key=lambda each: each.required_bytes) for name, known in floors if known}
    return {name: floor for name, floor in least.items() if not floor.fits}


def _is_compared(space: Space, level: Level, best: Estimate) -> bool:
    """Whether the next level is looked at beside a choice. Where each of several processes has the whole model it is
    not: nothing is passed over for its speed there. Of shards it is: they are gathered for each layer, and where
    completions are sampled for each of their tokens."""
    return level.offloads or space.base.processes == 1 or best.knobs.is_sharded


def _look_around(
    space: Space, level: Level, larger: Sequence[Knobs], after: tuple[Level, ...], memo: Memo, choice: Estimate
) -> None:
    """Asks what a choice is going to be compared with, while it is confirmed."""
    memo.ask(memo.of_each_weights(larger))
    memo.ask([floor for floor in larger if not memo.weights_exceed(floor)])
    if _is_compared(space, level, choice):
        _next_level(space, after, memo)


def _faster_by_now(
    space: Space,
    before: tuple[Level, ...],
    best: Estimate,
    memo: Memo,
    limits: Limits,
    passed: Mapping[str, Estimate],
) -> tuple[str, Estimate] | None:
    """Finds the plan of a level that was passed over for its speed, where what was rehearsed since shows a faster one.

    Of several processes the search of a later level meets points of the earlier ones that looked worse from there.
    """
    for level in before:
        if level.name in passed and passed[level.name].fits:
            again = best_of(space, level, memo)
            if again is not None and limits.keeps(again) and slowdown(again, best) <= space.max_slowdown:
                return level.name, again
    return None


def _found(
    space: Space,
    memo: Memo,
    chosen: tuple[str, Estimate],
    passed: Mapping[str, Estimate],
    following: Mapping[str, Estimate],
) -> Found:
    level, estimate = chosen
    beside = {**passed, **{name: other for name, other in following.items() if not _is_dominated(other, estimate)}}
    around = {each.name: beside[each.name] for each in levels(space) if each.name in beside}
    return Found(
        level=level,
        estimate=estimate,
        attempts=memo.attempts,
        levers=changes(space, estimate.knobs, memo, too_slow=[other for other in passed.values() if other.fits]),
        alternatives=tuple(
            candidate(other, beside=estimate, level=name, would_fit=() if other.fits else tuple(memo.would_fit(other)))
            for name, other in around.items()
        ),
    )


def _is_dominated(coarser: Estimate, chosen: Estimate) -> bool:
    """Whether a plan that does more harm gains nothing by it: both fit, and it is no faster."""
    return bool(chosen.tokens_per_second) and slowdown(chosen, coarser) <= 1 + TIE


def slowdown(one: Estimate, other: Estimate) -> float:
    """How many times as long a token takes with the first: 1.5 where it takes half as long again, 1 where none is known
    to take any time."""
    return other.tokens_per_second / one.tokens_per_second if one.tokens_per_second else 1.0


def _next_level(space: Space, further: tuple[Level, ...], memo: Memo) -> dict[str, Estimate]:
    """The fastest plan of the next level that gives up more, if there is one, but for what is done only to fit."""
    for level in further:
        if level.harm is Harm.DATA or level.loses:
            return {}
        if level.offloads:
            continue
        best = best_of(space, level, memo, confirmed=False)
        if best is not None:
            return {level.name: best}
    return {}
