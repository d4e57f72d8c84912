"""A sweep: every combination of a few settings, each estimated exactly as given.

Example: ``max_length`` 4 and 32 with 1, 2 and 4 rows are six points, (4, 1), (4, 2), (4, 4), (32, 1), (32, 2), (32, 4).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from autotrain_mem.errors import (
    AutofitError,
    DatasetError,
    MissingExtraError,
    ModelError,
    PlanError,
    RehearsalError,
    UsageError,
)
from autotrain_mem.spec import Estimate
from autotrain_mem.spec.sweep import Axis, Setting, Sweep, SweepPoint

MOST_POINTS = 400
"""Each point is a rehearsal of 1 to 10 seconds: an hour at most, and what is more is a typing error or wants a script
that keeps what it has."""

REFUSALS = (UsageError, MissingExtraError, ModelError, DatasetError, PlanError, RehearsalError)
"""What is wrong with one combination, and says nothing about the others."""

Asked = TypeVar("Asked")
Worker = TypeVar("Worker")
OnPoint = Callable[[SweepPoint], None]
Call = Callable[[Worker], SweepPoint]


def combinations(axes: Sequence[Axis]) -> Iterator[tuple[Setting, ...]]:
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
    axes: Sequence[Axis],
    asked: Sequence[Asked | AutofitError],
    estimate: Callable[[Asked, Worker], Estimate],
    share_out: Callable[[Sequence[Call[Worker]]], Iterable[SweepPoint]],
    on_point: OnPoint = lambda point: None,
) -> Sweep:
    """Estimates every point; one that is refused does not end the others.

    Args:
        axes: Their combinations are the points.
        asked: For every combination what ``estimate`` takes, or why it was refused before that.
        estimate: Of one point, by one worker.
        share_out: Makes all calls, each with a worker that no other call has meanwhile; returns the points in order.
        on_point: Hears of every point as it is done, from whichever thread made the call.

    Raises:
        AutofitError: every point was refused; the error is the first one's.
    """

    def call(settings: tuple[Setting, ...], one: Asked | AutofitError, worker: Worker) -> SweepPoint:
        point = SweepPoint(settings=settings, outcome=_outcome(estimate, one, worker))
        on_point(point)
        return point

    pairs = zip(combinations(axes), asked, strict=True)
    points = share_out([functools.partial(call, settings, one) for settings, one in pairs])
    return _unless_all_refused(Sweep(axes=tuple(axes), points=tuple(points)))


def _outcome(
    estimate: Callable[[Asked, Worker], Estimate], asked: Asked | AutofitError, worker: Worker
) -> Estimate | AutofitError:
    if isinstance(asked, AutofitError):
        return asked
    try:
        return estimate(asked, worker)
    except REFUSALS as refusal:
        return refusal


def _unless_all_refused(sweep: Sweep) -> Sweep:
    first = sweep.points[0].refusal
    if first is not None and not sweep.estimates:
        raise first
    return sweep
