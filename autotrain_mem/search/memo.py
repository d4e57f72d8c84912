"""Caches rehearsals, and relates those of similar lines to each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Protocol

from autotrain_mem.search.levels import Line, allowed
from autotrain_mem.search.shardings import SAVES
from autotrain_mem.search.space import Space
from autotrain_mem.settings.knobs import BASE_BITS
from autotrain_mem.settings.levers import EIGHT_BIT, EXPANDABLE, LEVERS, NESTED_QUANT, PRECOMPUTING, SLOWING, is_pulled
from autotrain_mem.types import Candidate, Estimate, Knobs, Owner, Phase

OnAttempt = Callable[[Candidate], None]
"""Called with every rehearsed configuration."""


class Predictor(Protocol):
    """Predicts points for the search, which is independent of the job, the device and the workers."""

    def rehearse(self, points: Sequence[Knobs], *, whole: bool) -> Sequence[Estimate]:
        """Rehearses points on the ``whole`` model or copies with fewer layers, which takes 1 to 20 seconds each."""

    def exceeds(self, knobs: Knobs) -> bool:
        """Returns whether the number of parameters alone shows that a point does not fit."""

    def foresee(self, points: Sequence[Knobs], *, whole: bool) -> None:
        """Starts rehearsing the ``whole`` model of points that will be asked for, or points that may be asked for, the
        likeliest first."""

    def over_steps(self, estimate: Estimate) -> Estimate:
        """Adds the bytes reserved over a run with rows of mixed lengths, if known; takes a second."""

    def tokens_per_second(self, known: Estimate, knobs: Knobs) -> float:
        """Predicts the speed with another micro-batch or sharding, or more levers that only cost time."""

    def would_fit(self, estimate: Estimate, *, rehearsed: bool) -> Sequence[str]:
        """Describes devices that a run would fit; ``rehearsed`` checks them with rehearsals, which takes seconds."""


class Memo:
    """Caches a predictor's answers and keeps the attempts in order.

    ``expandable_segments`` costs nothing and needs no rehearsal of its own: if the job allows it, it is on for a point
    that does not fit without it and needs less with it.
    """

    def __init__(self, space: Space, predictor: Predictor, on_attempt: OnAttempt = lambda attempt: None) -> None:
        self.predictor = predictor
        self._on_attempt = on_attempt
        self._allow_expandable = allowed(LEVERS[EXPANDABLE], space)
        # Keys are knobs without expandable segments: if the user sets them, they are the same in all points.
        self._estimates: dict[Knobs, Estimate] = {}
        self._attempts: list[Candidate] = []
        self._speeds: dict[tuple[Knobs, int | None, Knobs], float] = {}

    def __call__(self, knobs: Knobs) -> Estimate:
        """Returns the estimate of a point; rehearses it if necessary."""
        self.ask([knobs])
        return self._estimates[knobs.growing(False)]

    def ask(self, points: Sequence[Knobs], *, whole: bool = False) -> None:
        """Rehearses, in one call, the points that are still unknown."""
        asked = [knobs for knobs in dict.fromkeys(map(self._native, points)) if not self._is_known(knobs, whole)]
        if not asked:
            return
        for knobs, estimate in zip(asked, self.predictor.rehearse(asked, whole=whole), strict=True):
            judged = self._expanded(estimate)
            self._estimates[knobs.growing(False)] = judged
            self._attempts.append(candidate(judged))
            self._on_attempt(self._attempts[-1])

    def foresee(self, points: Sequence[Knobs], *, whole: bool) -> None:
        """Starts rehearsing unknown points, as :meth:`Predictor.foresee` does."""
        unknown = [knobs for knobs in map(self._native, points) if not self._is_known(knobs, whole)]
        self.predictor.foresee(unknown, whole=whole)

    def over_steps(self, knobs: Knobs) -> None:
        """Checks whether a point that fits also fits over a whole run with rows of every length."""
        estimate = self(knobs)
        if estimate.fits and estimate.memory.mixed_lengths is None:
            judged, before = self._expanded(self.predictor.over_steps(estimate)), candidate(estimate)
            self._estimates[knobs.growing(False)] = judged
            self._attempts = [candidate(judged) if each == before else each for each in self._attempts]

    def known(self, points: Sequence[Knobs]) -> list[Estimate]:
        """Returns the known estimates of these points."""
        found = (self._estimates.get(knobs.growing(False)) for knobs in points)
        return [estimate for estimate in found if estimate is not None]

    def speed(self, known: Estimate, knobs: Knobs) -> float:
        """Returns the tokens per second of a point, predicted from the work of a rehearsed one."""
        key = (known.knobs, known.memory.rehearsed_layers, knobs)
        if key not in self._speeds:
            self._speeds[key] = self.predictor.tokens_per_second(known, knobs)
        return self._speeds[key]

    def weights_exceed(self, knobs: Knobs) -> bool:
        """Returns whether merely loading this point's weights exceeded the budget, so that the point cannot fit."""
        return any(_weights(knobs) == _weights(each.knobs) for each in self.estimates if _is_beyond_loading(each))

    def of_each_weights(self, points: Sequence[Knobs]) -> list[Knobs]:
        """Returns the first point with each kind of weights, without those whose weights exceed the budget."""
        first: dict[object, Knobs] = {}
        for knobs in points:
            first.setdefault(_weights(knobs), knobs)
        return [knobs for knobs in first.values() if not self.weights_exceed(knobs)]

    @property
    def any_weights_exceed(self) -> bool:
        """Returns whether loading any kind of weights exceeded the budget."""
        return any(map(_is_beyond_loading, self.estimates))

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """Returns all estimates so far."""
        return tuple(self._estimates.values())

    @property
    def attempts(self) -> tuple[Candidate, ...]:
        """Returns every rehearsal in order."""
        return tuple(self._attempts)

    def _native(self, knobs: Knobs) -> Knobs:
        return knobs.growing(False) if self._allow_expandable else knobs

    def _is_known(self, knobs: Knobs, whole: bool) -> bool:
        known = self._estimates.get(knobs.growing(False))
        return known is not None and (not whole or known.memory.rehearsed_layers is None)

    def _expanded(self, estimate: Estimate) -> Estimate:
        if estimate.fits or not self._allow_expandable:
            return estimate
        return min(estimate, estimate.growing(), key=lambda each: each.required_bytes)


def _is_beyond_loading(estimate: Estimate) -> bool:
    """Returns whether the loaded model alone is too large, without its first batch, which may hold images."""
    memory = estimate.memory
    loaded_bytes = memory.phases.get(Phase.LOAD, 0) - memory.owners_at_peak.get(Owner.OTHER, 0)
    return loaded_bytes + estimate.outside_bytes > estimate.budget_bytes


_weights = attrgetter(
    *("use_peft", PRECOMPUTING, "dtype", *BASE_BITS, "use_bnb_nested_quant"),
    *("sharding", "dp_replicate_size", "fsdp_offload_params"),
)
"""Reads the knobs that decide the bytes of all weights. The first two can make a reference model unnecessary."""


def candidate(
    estimate: Estimate, *, level: str = "", beside: Estimate | None = None, would_fit: tuple[str, ...] = ()
) -> Candidate:
    """Makes a record of an estimate: a rehearsal, or a level's alternative ``beside`` the plan."""
    ratio = None
    if beside is not None and beside.tokens_per_second and estimate.fits:
        ratio = estimate.tokens_per_second / beside.tokens_per_second
    return Candidate(
        level=level,
        knobs=estimate.knobs,
        required_bytes=estimate.required_bytes,
        budget_bytes=estimate.budget_bytes,
        tokens_per_second=estimate.time.known_tokens_per_second,
        rehearsed_layers=estimate.memory.rehearsed_layers,
        ratio=ratio,
        would_fit=would_fit,
    )


HALF_BITS = 16
"""Bits per weight of a base that is not quantized."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineHistory:
    """Holds the estimates of a line, and of lines that differ only in levers that save bytes.

    Example: for a line with recomputation, ``gentler`` are those without it, ``harder`` those that also offload.
    """

    line: Line
    known: Sequence[Estimate]
    gentler: Sequence[Sequence[Estimate]]
    """Estimates of lines with fewer levers that save bytes, or another sharding; the most similar line comes last."""
    harder: Sequence[Sequence[Estimate]]
    """Estimates of lines that need less: they have at least this line's levers, and a sharding that saves no less."""
    shared_harder: Sequence[Sequence[Estimate]]
    """Estimates of lines with more levers that save bytes, under any sharding."""
    heavier: Sequence[Sequence[Estimate]]
    """Estimates of lines with the same adapter on a base with more bits, which need no less."""


def sights(memo: Memo, lines: Sequence[Line], among: Sequence[Line]) -> list[LineHistory]:
    """Returns the history of each line, from the rehearsals of all lines."""
    rehearsed = [(other[0], known) for other in among if (known := memo.known(other))]

    def history(line: Line) -> LineHistory:
        related: dict[str, list[list[Estimate]]] = {"gentler": [], "harder": [], "shared_harder": [], "heavier": []}
        likest_last = sorted(
            rehearsed, key=lambda pair: (pair[0].sharding == line[0].sharding, len(saving_levers(pair[0])))
        )
        for other, known in likest_last:
            for relation in _relations(line[0], other):
                related[relation].append(known)
        return LineHistory(line=line, known=memo.known(line), **related)

    return [history(line) for line in lines]


@lru_cache(maxsize=65536)  # a search compares all pairs of lines at every turn
def _relations(one: Knobs, other: Knobs) -> tuple[str, ...]:
    """Names the fields of :class:`LineHistory` to which another line's estimates belong."""
    levers, others = saving_levers(one), saving_levers(other)
    names = []
    if (levers != others or one.sharding != other.sharding) and _otherwise(one) == _otherwise(other):
        if others <= levers:
            names.append("gentler")
        elif levers <= others:
            names.append("shared_harder")
        if levers <= others and SAVES.get(one.sharding, frozenset()) <= SAVES.get(other.sharding, frozenset()):
            names.append("harder")
    if other.use_peft and one.base_bits is not None and (other.base_bits or HALF_BITS) > one.base_bits:
        base = {name: getattr(one, name) for name in ("dtype", *BASE_BITS, NESTED_QUANT)}
        names += ["heavier"] if replace(other, **base) == one else []
    return tuple(names)


_others = attrgetter(
    "use_peft", PRECOMPUTING, "use_liger_kernel", "lora_r", "dtype", "base_bits", "use_bnb_nested_quant"
)


def _otherwise(knobs: Knobs) -> tuple[object, ...]:
    """Returns the setting without the levers that only save bytes."""
    row = LEVERS[EIGHT_BIT]
    value = getattr(knobs, row.knobs[0])
    return row.to if value in row.moves_from else value, *_others(knobs)


@lru_cache(maxsize=65536)
def saving_levers(knobs: Knobs) -> frozenset[str]:
    """Returns the levers of a point that save bytes and make no step faster."""
    rounded = {EIGHT_BIT} if is_pulled(LEVERS[EIGHT_BIT], knobs) else set()
    return frozenset(name for name in SLOWING if getattr(knobs, name)) | rounded
