"""A sweep: every combination of a few settings, each estimated exactly as given.

Example: ``max_length`` 4 and 32 with 1, 2 and 4 rows are six points, (4, 1), (4, 2), (4, 4), (32, 1), (32, 2), (32, 4).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autotrain_mem.planning.rehearsals import Rehearsals
from autotrain_mem.support.errors import (
    AutofitError,
    DatasetError,
    MissingExtraError,
    ModelError,
    PlanError,
    RehearsalError,
    UsageError,
)
from autotrain_mem.types import Estimate
from autotrain_mem.types.gpu_comparison import Axis, AxisValue, Sweep, SweepPoint
from autotrain_mem.worker.client import Worker
from autotrain_mem.worker.pool import Workers

MOST_POINTS = 400
"""Each point is a rehearsal of 1 to 10 seconds: an hour at most, and what is more is a typing error or wants a script
that keeps what it has."""

REFUSALS = (UsageError, MissingExtraError, ModelError, DatasetError, PlanError, RehearsalError)
"""What is wrong with one combination, and says nothing about the others."""


def combinations(axes: Sequence[Axis]) -> Iterator[tuple[AxisValue, ...]]:
    """A setting of each axis, in every combination; the last axis varies fastest."""
    return itertools.product(*(axis.settings for axis in axes))


def check_size(lengths: Sequence[int]) -> None:
    """Raises UsageError for axes of these lengths that together have too many points."""
    points = math.prod(lengths)
    if points > MOST_POINTS:
        product = " x ".join(map(str, lengths))
        raise UsageError(
            f"The sweep has {product} = {points} points, and takes at most {MOST_POINTS}.",
            hint="Every point is a rehearsal of seconds: sweep fewer values, or one part after the other.",
        )


def estimate_all(
    workers: Workers,
    axes: Sequence[Axis],
    asked: Sequence[Rehearsals | AutofitError],
    estimate: Callable[[Rehearsals], Estimate],
    on_point: Callable[[SweepPoint], None] = lambda point: None,
) -> Sweep:
    """Estimates every combination of the axes' settings; one that is refused does not end the others.

    Args:
        asked: The job of every combination, in the order of :func:`combinations`, or why there is none.
        estimate: Of one point, with one worker, which no other call has meanwhile.
        on_point: Hears of every point as it is done, from whichever thread waited for it.

    Raises:
        AutofitError: every point was refused; the error is the first one's.
    """

    def call(settings: tuple[AxisValue, ...], one: Rehearsals | AutofitError, worker: Worker) -> SweepPoint:
        outcome: Estimate | AutofitError
        try:
            alone = Workers.holding(worker)
            outcome = one if isinstance(one, AutofitError) else estimate(replace(one, workers=alone))
        except REFUSALS as refusal:
            outcome = refusal
        point = SweepPoint(settings=settings, outcome=outcome)
        on_point(point)
        return point

    pairs = zip(combinations(axes), asked, strict=True)
    points = workers.map([functools.partial(call, settings, one) for settings, one in pairs])
    sweep, first = Sweep(axes=tuple(axes), points=tuple(points)), points[0].refusal
    if first is not None and not sweep.estimates:
        raise first
    return sweep
