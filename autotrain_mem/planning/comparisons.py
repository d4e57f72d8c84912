"""Compares: one job planned for many cards, and every combination of a few settings, estimated exactly as given.

The kernels of cards are mostly the same: what was rehearsed for one serves the others.

Example of a sweep: ``max_length`` 4 and 32 with 1, 2 and 4 rows are six points, (4, 1), (4, 2), (4, 4), (32, 1), (32,
2), (32, 4).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from autotrain_mem.machine.prices import price_of
from autotrain_mem.planning.limits import limits_of, optimizer_steps
from autotrain_mem.planning.maximum import question_of
from autotrain_mem.planning.predictions import Predictions
from autotrain_mem.planning.rehearsals import Lengths, Rehearsals
from autotrain_mem.search.largest import find_most
from autotrain_mem.search.memo import Memo, OnAttempt
from autotrain_mem.search.search import find
from autotrain_mem.support.errors import (
    AutofitError,
    DatasetError,
    MissingExtraError,
    ModelError,
    PlanError,
    RehearsalError,
    UsageError,
)
from autotrain_mem.types import Candidate, Estimate, Footprint, Hardware
from autotrain_mem.types.gpu_comparison import (
    NO_PRICE,
    NOTHING_FITS,
    Axis,
    AxisValue,
    Cards,
    CardVerdict,
    Sweep,
    SweepPoint,
)
from autotrain_mem.worker.client import Worker
from autotrain_mem.worker.pool import Workers


def compare_cards(
    rehearsals: Rehearsals,
    cards: Sequence[Hardware],
    lengths: Lengths,
    on_attempt: Callable[[Hardware, Candidate], None] = lambda card, attempt: None,
) -> Cards:
    """The best plan for each card. Where few layers tell what the whole model does, no more are rehearsed.

    Args:
        rehearsals: Of the job; its own device is not looked at.

    Raises:
        UsageError: every card refuses the job; the error is the smallest one's.
        ModelError, DatasetError, RehearsalError: what is wrong whatever the card.
    """
    shared: dict[Any, Footprint] = {}
    ordered = sorted(cards, key=lambda card: (card.topology.processes * card.total_bytes, card.name))
    refused: list[UsageError] = []
    verdicts = []
    for card in ordered:
        try:
            verdicts.append(_judged(rehearsals, card, lengths, shared, partial(on_attempt, card)))
        except UsageError as error:  # such as a kernel that the card has not
            refused.append(error)
            verdicts.append(CardVerdict(hardware=card, refusal=error.message, price=price_of(card, rehearsals.prices)))
    if refused and len(refused) == len(ordered):
        raise refused[0]
    return Cards(verdicts=tuple(verdicts))


def _judged(
    rehearsals: Rehearsals,
    card: Hardware,
    lengths: Lengths,
    shared: dict[Any, Footprint],
    on_attempt: OnAttempt,
) -> CardVerdict:
    """The plan for one card, or why there is none. Raises UsageError where it is refused there."""
    rehearsals = rehearsals.on(card)
    if rehearsals.job.budget is not None and rehearsals.price is None:
        return CardVerdict(hardware=card, refusal=NO_PRICE, price=None)
    subject = rehearsals.subject(lengths=lengths)
    question = question_of(subject)
    space = subject.space() if question is None else question.space(question.values[0])
    limits = limits_of(subject, space.base)
    memo = Memo(space, Predictions(subject, shared, confirms=False), on_attempt)
    best = find(space, memo, limits) if question is None else find_most(question, memo, limits)
    if best is None:
        refusal = next(reversed(limits.refusals), NOTHING_FITS)
        return CardVerdict(hardware=card, refusal=refusal, price=subject.price)
    steps = optimizer_steps(subject, best.estimate.knobs)
    found, price = best.estimate, subject.price
    return CardVerdict(hardware=card, level=best.level, estimate=found, optimizer_steps=steps, price=price)


MOST_POINTS = 400
"""Each point is a rehearsal of 1 to 10 seconds: an hour at most, and what is more is a typing error or wants a script
that keeps what it has."""

REFUSALS = (UsageError, MissingExtraError, ModelError, DatasetError, PlanError, RehearsalError)
"""Errors about one combination, which say nothing about the others."""


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
            outcome = one if isinstance(one, AutofitError) else estimate(replace(one, workers=Workers.holding(worker)))
        except REFUSALS as refusal:
            outcome = refusal
        point = SweepPoint(settings=settings, outcome=outcome)
        on_point(point)
        return point

    pairs = zip(combinations(axes), asked, strict=True)
    points = workers.map([partial(call, settings, one) for settings, one in pairs])
    sweep, first = Sweep(axes=tuple(axes), points=tuple(points)), points[0].refusal
    if first is not None and not sweep.estimates:
        raise first
    return sweep
