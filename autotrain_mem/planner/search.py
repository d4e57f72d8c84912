"""Climb the levels of harm until one holds a plan, and take the fastest of that level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotrain_mem.planner.changes import changes
from autotrain_mem.planner.explore import best_of
from autotrain_mem.planner.ladder import allowed
from autotrain_mem.planner.levels import Level, levels
from autotrain_mem.planner.levers import EXPANDABLE, LEVERS
from autotrain_mem.planner.memo import Memo, Predictor, Told
from autotrain_mem.planner.nearest import does_not_fit
from autotrain_mem.planner.points import least_demanding
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Attempt, Estimate, Harm, Lever


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """What another level of harm has to offer: its fastest plan, or the least that it would need."""

    level: str
    estimate: Estimate
    would_fit: tuple[str, ...] = ()
    """Where the least that it needs would fit, if not here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Settings that were rehearsed and fit, what they change, and everything that was tried."""

    level: str
    estimate: Estimate
    attempts: tuple[Attempt, ...]
    levers: tuple[Lever, ...]
    rivals: tuple[Rival, ...]
    """Of the levels around: those of less harm that do not fit or are too slow, and the next one, least harm first."""


def search(space: Space, predictor: Predictor, told: Told = lambda attempt: None) -> Found:
    """The fastest plan at the first level of harm at which anything fits, unless the next is far faster.

    Example: an effective batch of 8 where 4 rows fit without checkpointing. Rehearsed are 8 rows without checkpointing
    (do not fit) and 1 row with it (fits), then 4 rows without it (fit), which nothing else can beat: three rehearsals,
    and those of the next level.

    Args:
        told: Hears of every configuration as it has been rehearsed.

    Raises:
        DoesNotFitError: no allowed point fits; the error names the nearest one that does.
        UsageError: ``space.forbid`` names an unknown lever.
    """
    memo = _memo(space, predictor, told)
    found = _climb(space, memo)
    if found is None:
        raise does_not_fit(space, memo)
    return found


def find(space: Space, predictor: Predictor, told: Told = lambda attempt: None) -> Found | None:
    """The same, and None where nothing allowed fits: no rehearsal goes into what would."""
    return _climb(space, _memo(space, predictor, told))


def _memo(space: Space, predictor: Predictor, told: Told) -> Memo:
    return Memo(predictor, may_expand=allowed(LEVERS[EXPANDABLE], space), told=told)


def _climb(space: Space, memo: Memo) -> Found | None:
    passed: list[Rival] = []
    every = levels(space)
    for number, level in enumerate(every):
        found = best_of(space, level, memo)
        if found is None:
            passed += _floor(space, level, memo)
            continue
        chosen = Rival(level=level.name, estimate=found)
        rival = _next_rival(space, every[number + 1 :], memo)
        if rival is None or slowdown(found, rival.estimate) <= space.max_slowdown:
            return _found(space, memo, chosen, passed, further=[rival] if rival else [])
        passed.append(chosen)
    fitting = [each for each in passed if each.estimate.fits]
    if not fitting:
        return None
    return _found(space, memo, fitting[-1], [each for each in passed if each is not fitting[-1]], further=[])


def _found(space: Space, memo: Memo, chosen: Rival, passed: Sequence[Rival], *, further: Sequence[Rival]) -> Found:
    too_slow = [each.estimate for each in passed if each.estimate.fits]
    return Found(
        level=chosen.level,
        estimate=chosen.estimate,
        attempts=memo.attempts,
        levers=changes(space, chosen.estimate.knobs, memo, too_slow=too_slow),
        rivals=(*passed, *further),
    )


def slowdown(one: Estimate, other: Estimate) -> float:
    """How many times as long a token takes with the first: 1.5 where it takes half as long again, 1 where none is known
    to take any time."""
    return other.tokens_per_second / one.tokens_per_second if one.tokens_per_second else 1.0


def _floor(space: Space, level: Level, memo: Memo) -> list[Rival]:
    """What a level that does not fit needs at least; nothing where no rehearsal was needed to know that."""
    known = memo.known([least_demanding(space, level)])
    return [
        Rival(level=level.name, estimate=each, would_fit=tuple(memo.would_fit(each))) for each in known if not each.fits
    ]


def _next_rival(space: Space, further: tuple[Level, ...], memo: Memo) -> Rival | None:
    """The fastest plan of the next level that gives up more. Rows are never cut for the sake of speed."""
    for level in further:
        if level.harm is Harm.DATA:
            return None
        if level.offloads:
            continue
        found = best_of(space, level, memo, confirmed=False)
        if found is not None:
            return Rival(level=level.name, estimate=found)
    return None
