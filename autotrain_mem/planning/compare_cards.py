"""One job planned for many cards, whose kernels are mostly the same: what was rehearsed for one serves the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autotrain_mem.machine.prices import price_of
from autotrain_mem.planning.lengths import Lengths
from autotrain_mem.planning.limits import limits_of, optimizer_steps
from autotrain_mem.planning.most import question_of
from autotrain_mem.planning.predictions import Predictions
from autotrain_mem.planning.rehearsals import Rehearsals
from autotrain_mem.search.largest import find_most
from autotrain_mem.search.memo import Memo
from autotrain_mem.search.search import NO_LIMITS, Found, find
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Candidate, Footprint, Hardware
from autotrain_mem.types.gpu_comparison import NO_PRICE, NOTHING_FITS, Cards, CardVerdict


def compare_cards(
    rehearsals: Rehearsals,
    cards: Sequence[Hardware],
    lengths: Lengths,
    on_attempt: Callable[[Hardware, Candidate], None] = lambda card, attempt: None,
) -> Cards:
    """The best plan for each card. Where few layers tell what the whole model does, no more are rehearsed.

    Args:
        rehearsals: Of the job; its own device is not looked at.
        on_attempt: Hears of every configuration as it has been judged for a card.

    Raises:
        UsageError: every card refuses the job; the error is the smallest one's.
        ModelError, DatasetError, RehearsalError: what is wrong whatever the card.
    """
    shared: dict[Any, Footprint] = {}
    ordered = sorted(cards, key=lambda card: (card.topology.processes * card.total_bytes, card.name))
    judged = [_judged(rehearsals, card, lengths, shared, on_attempt) for card in ordered]
    refusals = [each for each in judged if isinstance(each, UsageError)]
    if refusals and len(refusals) == len(ordered):
        raise refusals[0]
    return Cards(
        verdicts=tuple(_verdict(rehearsals, lengths, card, each) for card, each in zip(ordered, judged, strict=True))
    )


def _verdict(rehearsals: Rehearsals, lengths: Lengths, card: Hardware, best: Found | UsageError | str) -> CardVerdict:
    price = price_of(card, rehearsals.prices)
    if isinstance(best, Found):
        steps = optimizer_steps(rehearsals.job, best.estimate.knobs, lengths)
        return CardVerdict(hardware=card, level=best.level, estimate=best.estimate, optimizer_steps=steps, price=price)
    return CardVerdict(hardware=card, refusal=best if isinstance(best, str) else best.message, price=price)


def _judged(
    rehearsals: Rehearsals,
    card: Hardware,
    lengths: Lengths,
    shared: dict[Any, Footprint],
    on_attempt: Callable[[Hardware, Candidate], None],
) -> Found | UsageError | str:
    """The plan for one card, why it is refused there, such as a kernel that the card has not, or why there is none."""
    try:
        rehearsals = rehearsals.on(card)
        if rehearsals.job.budget is not None and rehearsals.price is None:
            return NO_PRICE
        facts = rehearsals.describe()
        name = rehearsals.job.maximized
        question = None if name is None else question_of(rehearsals, facts, lengths, name)
        space = rehearsals.space(facts, lengths) if question is None else question.space(question.values[0])
        limits = limits_of(rehearsals, space.base, lengths)
        predictions = Predictions(rehearsals, facts, lengths, shared, confirms=False)
        memo = Memo(space, predictions, lambda attempt: on_attempt(card, attempt))
        if question is None:
            best = find(space, memo, limits or NO_LIMITS)
        else:
            best = find_most(question, memo, limits or NO_LIMITS)
        refusals = [] if limits is None else limits.refusals
        return best or next(reversed(refusals), NOTHING_FITS)
    except UsageError as error:
        return error
