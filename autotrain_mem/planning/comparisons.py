"""Plans one job for many cards; what was rehearsed for one serves those with the same kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Candidate, Footprint, Hardware
from autotrain_mem.types.gpu_comparison import NO_PRICE, NOTHING_FITS, Cards, CardVerdict


def compare_cards(
    rehearsals: Rehearsals,
    cards: Sequence[Hardware],
    lengths: Lengths,
    on_attempt: Callable[[Hardware, Candidate], None] = lambda card, attempt: None,
) -> Cards:
    """Finds the best plan for each card, with few layers where these tell what the whole model does.

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
    rehearsals: Rehearsals, card: Hardware, lengths: Lengths, shared: dict[Any, Footprint], on_attempt: OnAttempt
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
