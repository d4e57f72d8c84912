"""Climbs the levels of harm to the first that has a plan, and takes the fastest plan of that level."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Protocol

from autotrain_mem.search.changes import changes
from autotrain_mem.search.explore import TIE, best_of
from autotrain_mem.search.levels import Level, levels
from autotrain_mem.search.memo import Memo, candidate
from autotrain_mem.search.nearest import does_not_fit
from autotrain_mem.search.space import Space
from autotrain_mem.support.errors import PlanError
from autotrain_mem.types import Candidate, Estimate, Harm, Knobs, LargestValue, Lever


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """Holds the chosen settings, their levers, and all attempts."""

    level: str
    estimate: Estimate
    attempts: tuple[Candidate, ...]
    levers: tuple[Lever, ...]
    alternatives: tuple[Candidate, ...]
    """Points of gentler levels that do not fit or are too slow, and of the next level, least harm first."""
    most: LargestValue | None = None
    """The largest value that fits, if one was asked for."""


class Limits(Protocol):
    """Limits a plan by other things than memory, such as a deadline."""

    def keeps(self, estimate: Estimate) -> bool:
        """Returns whether a plan that fits may be chosen."""

    def broken(self, fitting: Sequence[Estimate]) -> PlanError:
        """Returns the error for a search in which none of the ``fitting`` points may be chosen."""


def no_plan(space: Space, memo: Memo, limits: Limits | None) -> PlanError:
    """Returns the error for a search without a result; may rehearse a few more points for its hint."""
    fitting = [estimate for estimate in memo.estimates if estimate.fits]
    return limits.broken(fitting) if fitting and limits else does_not_fit(space, memo)


def find(space: Space, memo: Memo, limits: Limits | None = None, *, brief: bool = False) -> SearchResult | None:
    """Returns the fastest plan of the first level of harm at which anything fits, or of the next if that is far faster.

    None if nothing fits within the limits. Levels that are too large by the number of parameters alone are rehearsed
    last, unless ``brief``; if one of them fits after all, the levels are climbed again.

    Example: with an effective batch of 8, 4 rows fit without checkpointing. The search rehearses 8 rows without it (do
    not fit), 1 row with it (fits), and 4 rows without it (fit). No other point can be faster. Raises UsageError if
    ``space.forbid`` names an unknown lever."""
    climb = _Climb(space=space, memo=memo, limits=limits, levels=levels(space))
    floors = {level.name: level.least for level in climb.levels}
    too_large = {name: floor for name, floor in floors.items() if memo.predictor.exceeds(floor)}
    found = replace(climb, too_large=too_large, passed={}, brief=brief).plan()
    return climb.plan() if any(estimate.fits for estimate in memo.known([*too_large.values()])) else found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Climb:
    space: Space
    memo: Memo
    limits: Limits | None
    levels: tuple[Level, ...]
    too_large: Mapping[str, Knobs] = field(default_factory=dict)
    """Level -> its least demanding point, if the number of parameters alone is too large."""
    brief: bool = False
    passed: dict[str, Estimate] = field(default_factory=dict)
    """Level -> its best plan if that is too slow or beyond a limit; its least demanding point if nothing fits."""

    def plan(self) -> SearchResult | None:
        passed, keeps = self.passed, self._keeps
        for number, level in enumerate(self.levels):
            if level.name in self.too_large:
                continue
            if level.lengths and any(each.fits for each in passed.values()):
                break  # rows are cut only to fit, not for speed
            before, after = self.levels[:number], self.levels[number + 1 :]
            best = best_of(level, self.memo, meanwhile=partial(self._look_around, level, before, after))
            passed |= self._floors(self.levels[: number + (best is None)])
            if best is None:
                continue
            if not keeps(best):
                passed[level.name] = best
                continue
            if again := self._faster_by_now(before, best):
                passed.pop(again[0])
                return self._found(*again, {})
            following = self._next_level(after) if self._is_compared(level, best) else {}
            if all(slowdown(best, other) <= self.space.max_slowdown for other in following.values()):
                return self._found(level.name, best, following)
            passed[level.name] = best
        fitting = [name for name, estimate in passed.items() if estimate.fits and keeps(estimate)]
        return self._found(fitting[-1], passed.pop(fitting[-1]), {}) if fitting else None

    def _keeps(self, estimate: Estimate) -> bool:
        return self.limits is None or self.limits.keeps(estimate)

    def _floors(self, before: tuple[Level, ...]) -> dict[str, Estimate]:
        """Returns, for each level without a plan, the known point that needs the least memory."""
        floors = [(level.name, self.memo.known(level.floors)) for level in before if level.name not in self.passed]
        least = {name: min(known, key=lambda each: each.required_bytes) for name, known in floors if known}
        return {name: floor for name, floor in least.items() if not floor.fits}

    def _is_compared(self, level: Level, best: Estimate) -> bool:
        """Returns whether to compare a choice with the next level. Plain DDP is not compared: sharding is no faster."""
        return level.offloads or self.space.base.processes == 1 or best.knobs.is_sharded

    def _look_around(self, level: Level, before: tuple[Level, ...], after: tuple[Level, ...], choice: Estimate) -> None:
        memo = self.memo
        larger = [self.too_large[each.name] for each in before if each.name in self.too_large and not self.brief]
        compared = [each.most for each in after if not each.offloads] if self._is_compared(level, choice) else []
        memo.foresee([*compared[:1], *larger], whole=False)
        memo.ask(memo.of_each_weights(larger))
        memo.ask([floor for floor in larger if not memo.weights_exceed(floor)])
        if self._is_compared(level, choice):
            self._next_level(after)

    def _faster_by_now(self, before: tuple[Level, ...], best: Estimate) -> tuple[str, Estimate] | None:
        """Returns a level that was passed over for its speed, with its new plan, if that is now fast enough."""
        for level in before:
            if level.name in self.passed and self.passed[level.name].fits:
                again = best_of(level, self.memo)
                if again and self._keeps(again) and slowdown(again, best) <= self.space.max_slowdown:
                    return level.name, again
        return None

    def _next_level(self, further: tuple[Level, ...]) -> dict[str, Estimate]:
        """Returns the fastest plan of the next level. Skips levels that offload or that are used only to fit."""
        for level in takewhile(lambda level: level.harm is not Harm.DATA, further):
            if not level.offloads and (best := best_of(level, self.memo, confirmed=False)):
                return {level.name: best}
        return {}

    def _found(self, level: str, estimate: Estimate, following: Mapping[str, Estimate]) -> SearchResult:
        """Returns a choice with its alternatives; those that do more harm and are no faster are left out."""
        is_timed = bool(estimate.tokens_per_second)
        faster = {name: each for name, each in following.items() if not is_timed or slowdown(estimate, each) > 1 + TIE}
        beside = {**self.passed, **faster}
        around = {each.name: beside[each.name] for each in self.levels if each.name in beside}
        too_slow = [other for other in self.passed.values() if other.fits]
        return SearchResult(
            level=level,
            estimate=estimate,
            attempts=self.memo.attempts,
            levers=changes(self.space, estimate.knobs, self.memo, too_slow=too_slow),
            alternatives=tuple(
                candidate(
                    other,
                    beside=estimate,
                    level=name,
                    would_fit=() if other.fits else tuple(self.memo.predictor.would_fit(other, rehearsed=False)),
                )
                for name, other in around.items()
            ),
        )


def slowdown(one: Estimate, other: Estimate) -> float:
    """Returns the ratio of the first's time per token to the other's; 1 if unknown."""
    return other.tokens_per_second / one.tokens_per_second if one.tokens_per_second else 1.0
