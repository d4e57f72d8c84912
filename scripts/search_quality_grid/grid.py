"""Every point of every level up to the chosen one, and what the search made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from autotrain_mem.search.explore import TIE
from autotrain_mem.search.levels import Level, allowed, levels
from autotrain_mem.search.memo import Memo, Predictor
from autotrain_mem.search.search import SearchResult, find
from autotrain_mem.search.space import Space
from autotrain_mem.settings.levers import EXPANDABLE, LEVERS
from autotrain_mem.support import codec
from autotrain_mem.types import Estimate, Knobs

RATIO = 0.99
"""Of the grid's best tokens per second, what the choice must have."""
ASKED_AT_ONCE = 2
"""Micro-batches of one setting that are rehearsed together, one for each of two workers."""
FAR_TOO_LARGE = 1.25
"""Of the budget: what needs more with some rows fits with no more rows. Reserved bytes are not strictly monotone in
rows, but far within this."""

Told = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    level: str
    """Of the choice; ``none`` where nothing was found."""
    chosen: Estimate | None
    best: Estimate | None
    """The grid's fastest that fits at that level; of all levels, where nothing was found."""
    larger: Estimate | None
    """The next larger micro-batch with the choice's other settings, whether it fits or not."""
    skipped: str | None
    """A gentler level that holds a plan and that is not too slow to be taken."""
    few_layers: int
    """The search's rehearsals of few layers, and of the whole model."""
    whole: int
    points: int
    """Of the grid, with those of gentler levels."""

    @property
    def rehearsals(self) -> int:
        return self.few_layers + self.whole

    @property
    def ratio(self) -> float:
        """The choice's tokens per second over the grid's best; 1 where there is nothing to choose."""
        if self.best is None:
            return 1.0
        return 0.0 if self.chosen is None else self.chosen.tokens_per_second / self.best.tokens_per_second

    @property
    def use(self) -> float:
        """Share of the budget that the choice needs."""
        return 0.0 if self.chosen is None else self.chosen.required_bytes / self.chosen.budget_bytes

    @property
    def gain(self) -> float:
        """What the next larger micro-batch would add to the speed, as a share, if there were room."""
        if self.chosen is None or self.larger is None:
            return 0.0
        return self.larger.tokens_per_second / self.chosen.tokens_per_second - 1

    @property
    def could_gain(self) -> bool:
        """Whether that is more than the prediction can tell apart."""
        return self.gain > TIE


def compare(space: Space, predictor: Predictor, told: Told = lambda line: None) -> Outcome:
    """Search, and look at everything the search could have taken. Raises RehearsalError."""
    found = find(space, Memo(space, predictor))
    every = [level for level in levels(space) if not level.lengths]
    names = [level.name for level in every]
    reached = names.index(found.level) if found else len(every) - 1
    grids = [_grid(space, level, predictor, told) for level in every[: reached + 1]]
    faster_than = found.estimate.tokens_per_second / RATIO if found else 0.0
    bests = [best_of(grid, predictor, faster_than if number == reached else 0.0) for number, grid in enumerate(grids)]
    return Outcome(
        level=found.level if found else "none",
        chosen=found.estimate if found else None,
        best=bests[-1] if found else next(filter(None, bests), None),
        larger=_larger(grids[-1], found.estimate) if found else None,
        skipped=_skipped(every, bests, found, space.max_slowdown) if found else None,
        few_layers=sum(each.rehearsed_layers is not None for each in found.attempts) if found else 0,
        whole=sum(each.rehearsed_layers is None for each in found.attempts) if found else 0,
        points=sum(map(len, grids)),
    )


def _grid(space: Space, level: Level, predictor: Predictor, told: Told) -> list[Estimate]:
    """Each setting with and without checkpointing at every micro-batch, each with the segments that it may have.

    Of each setting the rows grow until they need far too much.
    """
    every = [sorted(line, key=lambda knobs: knobs.per_device_train_batch_size) for line in level.lines]
    may_expand, done, left_out = allowed(LEVERS[EXPANDABLE], space), list[Estimate](), 0
    for line in every:
        rest = iter(line)
        while some := list(islice(rest, ASKED_AT_ONCE)):
            estimates = predictor.rehearse(some, whole=False)
            done += [each if each.fits or not may_expand else each.growing() for each in estimates]
            if done[-1].required_bytes > FAR_TOO_LARGE * done[-1].budget_bytes:
                left_out += len(list(rest))
            told(f"{level.name}: {len(done)} of {sum(map(len, every)) - left_out} points")
    return done


def best_of(grid: Sequence[Estimate], predictor: Predictor, faster_than: float = 0.0) -> Estimate | None:
    """The fastest that fits. One that would beat the choice, or hold its level, has to fit on the whole model too.

    Args:
        faster_than: Tokens per second up to which what few layers tell is enough.
    """
    for each in sorted((each for each in grid if each.fits), key=lambda each: -each.tokens_per_second):
        if each.tokens_per_second <= faster_than or each.memory.rehearsed_layers is None:
            return each
        (whole,) = predictor.rehearse([each.knobs], whole=True)
        if whole.fits:
            return whole
    return None


def _larger(grid: Sequence[Estimate], chosen: Estimate) -> Estimate | None:
    setting = _apart_from_rows(chosen.knobs)

    def rows(estimate: Estimate) -> int:
        return estimate.knobs.per_device_train_batch_size

    line = [each for each in grid if _apart_from_rows(each.knobs) == setting and rows(each) > rows(chosen)]
    return min(line, key=rows, default=None)


def _apart_from_rows(knobs: Knobs) -> dict[str, object]:
    free = {"expandable_segments", *(name for lever in ("micro_batch", "eval_batch") for name in LEVERS[lever].knobs)}
    return {name: value for name, value in codec.to_json(knobs).items() if name not in free}


def _skipped(
    every: Sequence[Level], bests: Sequence[Estimate | None], found: SearchResult, max_slowdown: float
) -> str | None:
    """The first level that fits and was passed over, though the next that gives up more is not that much faster.

    Beyond the grid's levels the search's own word stands for what is next.
    """
    offers = {each.level: each for each in found.alternatives if each.fits}
    beyond = [offers.get(level.name) for level in every[len(bests) :]]
    fitting = [(level, best) for level, best in zip(every, [*bests, *beyond], strict=True) if best is not None]
    for number, (level, best) in enumerate(fitting):
        if level.name == found.level:
            return None
        following = (other.tokens_per_second or 0.0 for further, other in fitting[number + 1 :] if not further.offloads)
        if next(following, 0.0) <= max_slowdown * (best.tokens_per_second or 0.0):
            return level.name
    return None
