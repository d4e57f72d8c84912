"""Rehearses every point of every level up to the chosen one, and compares them with the search's choice."""

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
"""The least speed that the choice must have, as a share of the grid's best."""
ASKED_AT_ONCE = 2
"""How many micro-batches of one setting are rehearsed together, one by each of two workers."""
FAR_TOO_LARGE = 1.25
"""A share of the budget: if a micro-batch needs more, no larger one is tried. Reserved bytes do not always grow with
rows, but they never fall by so much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    level: str
    """The level of the choice; ``none`` if nothing was found."""
    chosen: Estimate | None
    best: Estimate | None
    """The grid's fastest point that fits at that level, or at any level if nothing was found."""
    larger: Estimate | None
    """The next larger micro-batch with the choice's other settings, whether it fits or not."""
    skipped: str | None
    """A less harmful level that has a plan which is not too slow."""
    few_layers: int
    """The number of the search's rehearsals with few layers."""
    whole: int
    """The number of the search's rehearsals of the whole model."""
    points: int
    """The number of points in the grid, including less harmful levels."""

    @property
    def rehearsals(self) -> int:
        return self.few_layers + self.whole

    @property
    def ratio(self) -> float:
        """The choice's tokens per second divided by the grid's best; 1 if nothing fits."""
        if self.best is None:
            return 1.0
        return 0.0 if self.chosen is None else self.chosen.tokens_per_second / self.best.tokens_per_second

    @property
    def use(self) -> float:
        """The share of the budget that the choice needs."""
        return 0.0 if self.chosen is None else self.chosen.required_bytes / self.chosen.budget_bytes

    @property
    def gain(self) -> float:
        """How much faster the next larger micro-batch would be, as a share; 0 if there is none."""
        if self.chosen is None or self.larger is None:
            return 0.0
        return self.larger.tokens_per_second / self.chosen.tokens_per_second - 1

    @property
    def could_gain(self) -> bool:
        """Whether the gain is larger than the differences that the search treats as ties."""
        return self.gain > TIE


def compare(space: Space, predictor: Predictor, told: Callable[[str], None] = lambda line: None) -> Outcome:
    """Searches, and rehearses every point that the search could have chosen. Raises RehearsalError."""
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


def _grid(space: Space, level: Level, predictor: Predictor, told: Callable[[str], None]) -> list[Estimate]:
    """Returns the estimates of a level's settings at every micro-batch, with expandable segments if only these fit.

    The micro-batches of a setting end with the first that exceeds ``FAR_TOO_LARGE``.
    """
    every = [sorted(line, key=lambda knobs: knobs.per_device_train_batch_size) for line in level.lines]
    allow_expandable, done, left_out = allowed(LEVERS[EXPANDABLE], space), list[Estimate](), 0
    for line in every:
        rest = iter(line)
        while some := list(islice(rest, ASKED_AT_ONCE)):
            estimates = predictor.rehearse(some, whole=False)
            done += [each if each.fits or not allow_expandable else each.growing() for each in estimates]
            if done[-1].required_bytes > FAR_TOO_LARGE * done[-1].budget_bytes:
                left_out += len(list(rest))
            told(f"{level.name}: {len(done)} of {sum(map(len, every)) - left_out} points")
    return done


def best_of(grid: Sequence[Estimate], predictor: Predictor, faster_than: float = 0.0) -> Estimate | None:
    """Returns the fastest point that fits. If it is faster than ``faster_than``, the whole model must fit too.
    ``faster_than``: tokens per second up to which a rehearsal of few layers suffices."""
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
    """Returns the first level that fits and was wrongly skipped: the next is at most ``max_slowdown`` times as fast.

    For levels beyond the grid, the search's own alternatives are used.
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
