"""One job planned for many cards, whose kernels are mostly the same: what was rehearsed for one serves the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autotrain_mem.engine.predictions import Predictions
from autotrain_mem.engine.rehearsals import Lengths, Rehearsals
from autotrain_mem.errors import DoesNotFitError, UsageError
from autotrain_mem.planner.search import search
from autotrain_mem.spec import Attempt, Footprint, Hardware
from autotrain_mem.spec.cards import Cards, CardVerdict


def compare_cards(
    rehearsals: Rehearsals,
    cards: Sequence[Hardware],
    lengths: Lengths,
    told: Callable[[Hardware, Attempt], None] = lambda card, attempt: None,
) -> Cards:
    """The best plan for each card. Where few layers tell what the whole model does, no more are rehearsed.

    Args:
        rehearsals: Of the job; its own device is not looked at.
        told: Hears of every configuration as it has been judged for a card.

    Raises:
        ModelError, DatasetError, RehearsalError: what is wrong whatever the card.
    """
    shared: dict[Any, Footprint] = {}
    ordered = sorted(cards, key=lambda card: (card.total_bytes, card.name))
    return Cards(
        verdicts=tuple(_verdict(replace(rehearsals, hardware=card), lengths, shared, told) for card in ordered)
    )


def _verdict(
    rehearsals: Rehearsals,
    lengths: Lengths,
    shared: dict[Any, Footprint],
    told: Callable[[Hardware, Attempt], None],
) -> CardVerdict:
    card = rehearsals.hardware
    try:
        facts = rehearsals.describe()
        predictions = Predictions(rehearsals, facts, lengths, shared, confirms=False)
        found = search(rehearsals.space(facts, lengths), predictions, lambda attempt: told(card, attempt))
    except DoesNotFitError:
        return CardVerdict(hardware=card, refusal="nothing that is allowed fits")
    except UsageError as error:  # such as a kernel that this card has not
        return CardVerdict(hardware=card, refusal=error.message)
    return CardVerdict(hardware=card, level=found.level, estimate=found.estimate)
