"""Climb the levels of harm until one holds a plan, and take the fastest of that level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotrain_mem.planner.changes import changes
from autotrain_mem.planner.explore import best_of
from autotrain_mem.planner.ladder import allowed
from autotrain_mem.planner.levels import Level, levels
from autotrain_mem.planner.levers import EXPANDABLE, LEVERS
from autotrain_mem.planner.memo import Memo, OnAttempt, Predictor
from autotrain_mem.planner.nearest import does_not_fit
from autotrain_mem.planner.points import least_demanding
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Candidate, Estimate, Harm, Lever
from autotrain_mem.spec.estimate import candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Settings that were rehearsed and fit, what they change, and everything that was tried."""

    level: str
    estimate: Estimate
    attempts: tuple[Candidate, ...]
    levers: tuple[Lever, ...]
    alternatives: tuple[Candidate, ...]
    """Of the levels around: those of less harm that do not fit or are too slow, and the next one, least harm first."""


def search(space: Space, predictor: Predictor, on_attempt: OnAttempt = lambda attempt: None) -> Found:
    """The fastest plan at the first level of harm at which anything fits, unless the next is far faster.

    Example: an effective batch of 8 where 4 rows fit without checkpointing. Rehearsed are 8 rows without checkpointing
    (do not fit) and 1 row with it (fits), then 4 rows without it (fit), which nothing else can beat: three rehearsals,
    and those of the next level.

    Args:
        on_attempt: Hears of every configuration as it has been rehearsed.

    Raises:
        DoesNotFitError: no allowed point fits; the error names the nearest one that does.
        UsageError: ``space.forbid`` names an unknown lever.
    """
    memo = _memo(space, predictor, on_attempt)
    plan = _climb(space, memo)
    if plan is None:
        raise does_not_fit(space, memo)
    return plan


def find(space: Space, predictor: Predictor, on_attempt: OnAttempt = lambda attempt: None) -> Found | None:
    """The same, and None where nothing allowed fits: no rehearsal goes into what would."""
    return _climb(space, _memo(space, predictor, on_attempt))


def _memo(space: Space, predictor: Predictor, on_attempt: OnAttempt) -> Memo:
    return Memo(predictor, may_expand=allowed(LEVERS[EXPANDABLE], space), on_attempt=on_attempt)


def _climb(space: Space, memo: Memo) -> Found | None:
    passed: dict[str, Estimate] = {}
    """Level -> its best, which is too slow, or the least that it needs."""
    every = levels(space)
    for number, level in enumerate(every):
        best = best_of(space, level, memo)
        if best is None:
            floor = memo.known([least_demanding(space, level)])  # none where no rehearsal was needed to know
            passed |= {level.name: floor[0]} if floor and not floor[0].fits else {}
            continue
        if again := _faster_by_now(space, every[:number], best, memo, passed):
            return _found(space, memo, again, {name: each for name, each in passed.items() if name != again[0]}, {})
        compares = level.offloads or space.base.processes == 1 or best.knobs.is_sharded
        following = _next_level(space, every[number + 1 :], memo) if compares else {}
        if all(slowdown(best, other) <= space.max_slowdown for other in following.values()):
            return _found(space, memo, (level.name, best), passed, following)
        passed[level.name] = best
    fitting = [name for name, estimate in passed.items() if estimate.fits]
    if not fitting:
        return None
    chosen = (fitting[-1], passed.pop(fitting[-1]))
    return _found(space, memo, chosen, passed, {})


def _faster_by_now(
    space: Space, before: tuple[Level, ...], best: Estimate, memo: Memo, passed: Mapping[str, Estimate]
) -> tuple[str, Estimate] | None:
    """Finds the plan of a level that was passed over for its speed, where what was rehearsed since shows a faster one.

    Of several processes the search of a later level meets points of the earlier ones that looked worse from there.
    """
    for level in before:
        if level.name in passed and passed[level.name].fits:
            again = best_of(space, level, memo)
            if again is not None and slowdown(again, best) <= space.max_slowdown:
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
    around = {**passed, **following}
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


def slowdown(one: Estimate, other: Estimate) -> float:
    """How many times as long a token takes with the first: 1.5 where it takes half as long again, 1 where none is known
    to take any time."""
    return other.tokens_per_second / one.tokens_per_second if one.tokens_per_second else 1.0


def _next_level(space: Space, further: tuple[Level, ...], memo: Memo) -> dict[str, Estimate]:
    """The fastest plan of the next level that gives up more, if there is one. Rows are never cut for speed's sake.

    Where each of several processes has the whole model it is not asked: nothing is passed over for its speed there. Of
    shards it is: they are gathered for each layer, and where completions are sampled for each of their tokens.
    """
    for level in further:
        if level.harm is Harm.DATA:
            return {}
        if level.offloads:
            continue
        best = best_of(space, level, memo, confirmed=False)
        if best is not None:
            return {level.name: best}
    return {}
