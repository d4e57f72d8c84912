"""One job planned for many cards, whose kernels are mostly the same: what was rehearsed for one serves the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autotrain_mem.engine.predict.predictions import Predictions
from autotrain_mem.engine.rehearsals import Lengths, Rehearsals
from autotrain_mem.errors import UsageError
from autotrain_mem.planner.search import Found, find
from autotrain_mem.spec import Candidate, Footprint, Hardware
from autotrain_mem.spec.gpu_comparison import NOTHING_FITS, Cards, CardVerdict


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
    return Cards(verdicts=tuple(_verdict(card, each) for card, each in zip(ordered, judged, strict=True)))


def _verdict(card: Hardware, best: Found | UsageError | None) -> CardVerdict:
    if isinstance(best, UsageError):
        return CardVerdict(hardware=card, refusal=best.message)
    if best is None:
        return CardVerdict(hardware=card, refusal=NOTHING_FITS)
    return CardVerdict(hardware=card, level=best.level, estimate=best.estimate)


def _judged(
    rehearsals: Rehearsals,
    card: Hardware,
    lengths: Lengths,
    shared: dict[Any, Footprint],
    on_attempt: Callable[[Hardware, Candidate], None],
) -> Found | UsageError | None:
    """The plan for one card, why it is refused there, such as a kernel that the card has not, or None."""
    try:
        rehearsals = rehearsals.on(card)
        facts = rehearsals.describe()
        predictions = Predictions(rehearsals, facts, lengths, shared, confirms=False)
        return find(rehearsals.space(facts, lengths), predictions, lambda attempt: on_attempt(card, attempt))
    except UsageError as error:
        return error
