"""Guesses the memory and the best speed of points that were not rehearsed, from points that were.

Guesses only steer the search: a chosen point is always rehearsed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import prod
from operator import attrgetter

from autotrain_mem.search.memo import LineHistory, Memo, saving_levers
from autotrain_mem.search.space import Space, with_rows
from autotrain_mem.settings.declaration import LeverRow, Savings
from autotrain_mem.settings.levers import BATCHES, EXPANDABLE, LADDER, LEVERS, OFFLOADING
from autotrain_mem.types import Estimate, Knobs, Owner, Phase

STATIC = (Owner.WEIGHTS, Owner.GRADIENTS, Owner.OPTIMIZER_STATE)
"""Owners whose bytes do not grow with the rows of a micro-batch."""
GROWING = (Phase.FORWARD, Phase.BACKWARD, Phase.GENERATE, Phase.SCORE, Phase.EVALUATE)
"""Phases whose peaks grow with the rows."""

_WITHOUT_EFFECT = [row for row in LADDER if row.at_best.kept < 1 or row.name in (*BATCHES, EXPANDABLE)]
_holds = attrgetter(*({each.name for each in fields(Knobs)} - {name for row in _WITHOUT_EFFECT for name in row.knobs}))
"""Reads the knobs that decide the bytes of :data:`STATIC`."""

LEAST_SLOWER = 1.02
"""The least slowdown by offloading: copies to the host use memory bandwidth."""
FEWER_ROWS_FASTER = 1.06
"""The largest speedup by fewer rows: 5 % in rehearsals of 0.5B to 1.5B models, rounded up."""
SHARED_FASTER = 1.05
"""The largest ratio of a speed to its prediction from another sharding: communication is estimated from bytes."""
LEEWAY_OF_ONE = 1.1
LEEWAY = 1.02
"""Guesses up to this factor of the budget are worth a rehearsal: ``LEEWAY_OF_ONE`` if a guess is from one point,
``LEEWAY`` if it is from a line. Reserved bytes deviate from a line by 1 to 2 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Holds a guessed speed in tokens per second; infinite if no similar point was rehearsed."""

    knobs: Knobs
    at_best: float
    expected: float


def speed(memo: Memo, sight: LineHistory, knobs: Knobs) -> Speed:
    """Guesses the speed from points of the same line, and from lines with fewer levers that cost time."""
    at_best, expected = float("inf"), float("inf")
    for known in sight.gentler:
        nearest = _nearest(known, knobs)
        offloads = (saving_levers(knobs) - saving_levers(nearest.knobs)) & frozenset(OFFLOADING)
        least = prod(LEAST_SLOWER for _ in offloads)
        least /= 1.0 if nearest.knobs.sharding == knobs.sharding else SHARED_FASTER
        usually = prod(LEVERS[name].usual.slower for name in offloads)
        at_best = min(at_best, _at_best(memo, known, knobs) / least)
        expected = memo.speed(nearest, knobs) / usually
    if sight.known:
        at_best = min(at_best, _at_best(memo, sight.known, knobs))
        expected = memo.speed(_nearest(sight.known, knobs), knobs)
    return Speed(knobs=knobs, at_best=at_best, expected=min(at_best, expected))


def _at_best(memo: Memo, known: Sequence[Estimate], knobs: Knobs) -> float:
    """Returns an upper bound of the speed from points of one line; fewer rows are no faster than more.

    There are two exceptions: a chunked loss writes a gradient of all tokens for each chunk, and one row needs no
    mask, so its keys and values are not repeated for each head, nor copied to the host as often.
    """
    nearest = _nearest(known, knobs)
    by_work = memo.speed(nearest, knobs)
    if _rows(knobs) >= _rows(nearest.knobs):
        return by_work
    same = memo.speed(nearest, with_rows(knobs, _rows(nearest.knobs)))
    larger = [each.tokens_per_second for each in known if _rows(each.knobs) > _rows(nearest.knobs)]
    if _rows(knobs) > 1 and max(larger, default=0.0) > nearest.tokens_per_second:
        return same
    offloads = any(LEVERS[name].offloads and not LEVERS[name].steps_on_host for name in saving_levers(knobs))
    is_unmasked = _rows(knobs) == 1 and offloads
    return same * FEWER_ROWS_FASTER if is_unmasked else min(max(by_work, same), same * FEWER_ROWS_FASTER)


def holds_too_much(memo: Memo, knobs: Knobs) -> bool:
    """Returns whether the weights, gradients and optimizer state of a rehearsed point that holds the same ones exceed
    the budget by themselves: every optimizer step holds all of them, whatever the micro-batch."""
    held = _holds(knobs)
    alike = [each for each in memo.estimates if _holds(each.knobs) == held]
    return any(static_bytes(each) + each.outside_bytes > each.budget_bytes * LEEWAY for each in alike)


def may_fit_at_once(space: Space, least: Estimate, knobs: Knobs) -> bool:
    """Returns whether a point without gradient accumulation may fit although fewer rows do not."""
    return _with_activations(space, least, knobs) <= least.budget_bytes * LEEWAY_OF_ONE


def promise(memo: Memo, space: Space, sight: LineHistory, beyond: float) -> Speed | None:
    """Returns the next point of a line to rehearse: the largest that should fit, or else the smallest that might. None
    if no point of the line can be faster than ``beyond``."""
    guessed = [speed(memo, sight, knobs) for knobs in may_fit(space, sight)]
    faster = [each for each in guessed if each.at_best > beyond]
    if sight.known:
        budget_bytes = sight.known[0].budget_bytes
        likely = [each for each in faster if required_bytes(space, sight.known, each.knobs) <= budget_bytes]
    elif sight.gentler:
        akin = sight.gentler[-1]
        usually = [(each, _with_levers(space, akin, each.knobs, attrgetter("usual"))) for each in faster]
        likely = [each for each, needed in usually if needed <= akin[0].budget_bytes]
    else:
        likely = faster
    return next(iter(likely[-1:] or faster[:1]), None)


def may_fit(space: Space, sight: LineHistory) -> list[Knobs]:
    """Returns the points of a line that were not rehearsed and may fit, smallest first."""
    rehearsed = {_rows(each.knobs) for each in sight.known}
    points = [knobs for knobs in sight.line if _rows(knobs) not in rehearsed and _is_possible(space, sight, knobs)]
    return points if sight.known or sight.gentler or sight.shared_harder else points[-1:]


def _is_possible(space: Space, sight: LineHistory, knobs: Knobs) -> bool:
    # As many rows or fewer failed on this line or, by more than the leeway, on a line that needs less.
    failed = [each for each in sight.known if not each.fits]
    harder = [each for known in sight.harder for each in known]
    failed += [each for each in harder if each.required_bytes > each.budget_bytes * LEEWAY]
    for each in failed:
        if _rows(each.knobs) <= _rows(knobs) and each.required_bytes + _accumulated(each, knobs) > each.budget_bytes:
            return False
    if len(sight.known) == 1:
        return may_fit_at_once(space, sight.known[0], knobs)
    if sight.known:
        return required_bytes(space, sight.known, knobs) <= sight.known[0].budget_bytes * LEEWAY
    for known in sight.heavier:  # a base with more bits needs as much beyond its weights
        weights = _nearest(known, knobs).memory.owners_at_peak.get(Owner.WEIGHTS, 0)
        if required_bytes(space, known, knobs) - weights > known[0].budget_bytes * LEEWAY_OF_ONE:
            return False
    for known in sight.gentler:
        nearest = _nearest(known, knobs)
        fewer = with_rows(knobs, min(_rows(knobs), _rows(nearest.knobs)))
        least = _with_levers(space, known, fewer, attrgetter("at_best")) + min(0.0, _accumulated(nearest, knobs))
        is_one = len(known) == 1 and saving_levers(nearest.knobs) == saving_levers(knobs)
        if least > known[0].budget_bytes * (LEEWAY_OF_ONE if is_one else LEEWAY):
            return False
    for known in sight.shared_harder:  # fewer levers, or more rows, keep no fewer activations
        nearest = _nearest(known, knobs)
        fewer = with_rows(knobs, min(_rows(knobs), _rows(nearest.knobs)))
        least = _scaled(space, nearest, fewer) + min(0.0, _accumulated(nearest, knobs))
        if least > known[0].budget_bytes * LEEWAY:
            return False
    return True


def _with_levers(
    space: Space, known: Sequence[Estimate], knobs: Knobs, savings: Callable[[LeverRow], Savings]
) -> float:
    """Guesses the bytes from points with another sharding, or with fewer levers, minus what the added levers save."""
    nearest = _nearest(known, knobs)
    if not (pulled := [LEVERS[name] for name in saving_levers(knobs) - saving_levers(nearest.knobs)]):
        return required_bytes(space, known, knobs)
    kept = prod(savings(row).kept for row in pulled)
    state = nearest.memory.owners_at_peak.get(Owner.OPTIMIZER_STATE, 0)
    on_device = not any(row.steps_on_host for row in pulled)
    taken = state * min(1.0, sum(savings(row).taken for row in pulled))
    return _scaled(space, nearest, knobs, kept=kept, step=float(on_device), taken=taken)


def _with_activations(space: Space, one: Estimate, knobs: Knobs) -> float:
    """Guesses the bytes from one point of a line: only its activations surely grow with the rows."""
    if _rows(knobs) <= _rows(one.knobs) or one.memory.peak_phase not in GROWING:
        return _scaled(space, one, knobs)
    more = space.micro_batch_tokens(knobs) / space.micro_batch_tokens(one.knobs) - 1
    grown = more * one.memory.owners_at_peak.get(Owner.ACTIVATIONS, 0)
    return max(one.required_bytes + grown + _accumulated(one, knobs), static_bytes(one) + one.outside_bytes)


def required_bytes(space: Space, known: Sequence[Estimate], knobs: Knobs) -> float:
    """Guesses the bytes of a point from rehearsed points of its line, or of a line with another sharding."""
    if len(known) == 1:
        return _scaled(space, known[0], knobs)
    pairs = list(pairwise(sorted(known, key=lambda each: _rows(each.knobs))))
    around = next((pair for pair in pairs if _rows(pair[1].knobs) >= _rows(knobs)), pairs[-1])
    return between(space, knobs, *around)


def between(space: Space, knobs: Knobs, small: Estimate, large: Estimate) -> float:
    """Returns the bytes of a point on the line through two rehearsed ones, if each phase is linear in tokens."""
    start, end = space.micro_batch_tokens(small.knobs), space.micro_batch_tokens(large.knobs)
    share = (space.micro_batch_tokens(knobs) - start) / (end - start) if end > start else 0.0
    return linear(small, large, share, knobs)


def linear(small: Estimate, large: Estimate, share: float, knobs: Knobs) -> float:
    """Interpolates the bytes of a point at this share of the way between two rehearsed ones.

    Each phase has its own line, since the optimizer step does not grow with the micro-batch. Between 1 row (step
    10 GiB, backward 6 GiB) and 8 rows (10 and 20 GiB) the peak is 10 GiB up to 3 rows, unlike a line through 10 and 20.
    """
    first, last = (
        {phase: held + _accumulated(known, knobs, phase) for phase, held in known.memory.phases.items()}
        for known in (small, large)
    )
    peaks = {phase: first[phase] + share * (last[phase] - first[phase]) for phase in first.keys() & last.keys()}
    # The cache, and bytes outside the allocator.
    beside, beside_large = (each.required_bytes - each.memory.peak_allocated_bytes for each in (small, large))
    return _largest(peaks, small, knobs) + (beside + share * (beside_large - beside))


def _accumulated(known: Estimate, knobs: Knobs, phase: Phase = Phase.FORWARD) -> float:
    """Returns how many more gradient bytes a phase holds with these knobs than at a rehearsed point; can be negative.
    Only later micro-steps start with gradients (``torch/optim/optimizer.py: zero_grad``)."""
    memory, training = known.memory, (Phase.FORWARD, Phase.BACKWARD)
    accumulates = (known.knobs.gradient_accumulation_steps > 1, knobs.gradient_accumulation_steps > 1)
    if memory.trained is None or accumulates[0] == accumulates[1] or phase not in training:
        return 0.0
    if not accumulates[1]:
        return -memory.trained.bytes / knobs.shards
    if memory.peak_phase not in training:
        return 0.0
    there = memory.owners_at_peak.get(Owner.GRADIENTS, 0) * known.knobs.shards
    return max(0.0, memory.trained.bytes - there) / knobs.shards


def _scaled(
    space: Space, known: Estimate, knobs: Knobs, *, kept: float = 1.0, step: float = 1.0, taken: float = 0.0
) -> float:
    """Guesses the bytes from one point: a phase's bytes beyond the model and its optimizer state grow with the rows.

    Levers reduce the growing bytes to the share ``kept`` and the optimizer step's own bytes to the share ``step``, and
    move ``taken`` bytes of optimizer state off the device. The cache stays the same share of the peak.
    """
    ratio = kept * space.micro_batch_tokens(knobs) / space.micro_batch_tokens(known.knobs)
    static, gathered = static_bytes(known), known.memory.owners_at_peak.get(Owner.GATHERED_WEIGHTS, 0)
    beyond = {phase: float(peak - static) for phase, peak in known.memory.phases.items() if peak > static}
    growing = {phase: (held - min(gathered, held)) * ratio + min(gathered, held) for phase, held in beyond.items()}
    beyond |= {phase: held for phase, held in growing.items() if phase in GROWING}
    if Phase.OPTIMIZER_STEP in beyond:
        beyond[Phase.OPTIMIZER_STEP] *= step
    peaks = {phase: static - taken + held + _accumulated(known, knobs, phase) for phase, held in beyond.items()}
    peak = _largest(peaks, known, knobs, taken=taken)
    return peak * known.reserved.peak_reserved_bytes / known.memory.peak_allocated_bytes + known.outside_bytes


def _largest(peaks: Mapping[Phase, float], known: Estimate, knobs: Knobs, *, taken: float = 0.0) -> float:
    """Returns the largest phase peak, adapted to the sharding."""
    held, static = known.memory.owners_at_peak, static_bytes(known) - taken
    if not peaks:
        return static
    is_alike = known.knobs.sharding == knobs.sharding
    if is_alike and known.knobs.fsdp_offload_params == knobs.fsdp_offload_params:
        return max(peaks.values())
    # Gathered weights: all of them, in half precision, if none are resharded.
    before = held.get(Owner.GATHERED_WEIGHTS, 0)
    whole = float(before)
    if knobs.sharding == "fsdp2-no-reshard":
        whole = held.get(Owner.WEIGHTS, 0) * known.knobs.shards / (2 if knobs.dtype == "float32" else 1)
    elif not knobs.is_sharded or known.knobs.sharding == "fsdp2-no-reshard":
        whole = 0.0
    kept = static * (0.0 if knobs.fsdp_offload_params else known.knobs.shards / knobs.shards)
    more = {phase: whole - before if phase in GROWING else 0.0 for phase in peaks}
    return max(peak - static + kept + more[phase] for phase, peak in peaks.items())


def static_bytes(known: Estimate) -> int:
    """Sums the bytes that do not grow with the rows."""
    return sum(known.memory.owners_at_peak.get(owner, 0) for owner in STATIC)


def _nearest(known: Sequence[Estimate], knobs: Knobs) -> Estimate:
    """Returns the point with the nearest number of rows; of two, the larger, whose kernels are more efficient."""
    return min(known, key=lambda each: (abs(_rows(each.knobs) - _rows(knobs)), -_rows(each.knobs)))


def _rows(knobs: Knobs) -> int:
    return knobs.per_device_train_batch_size
