"""The card that a job's plan fills."""

from __future__ import annotations

from collections.abc import Sequence

from autotrain_mem import api
from autotrain_mem.cli import flags
from autotrain_mem.support.errors import DoesNotFitError
from autotrain_mem.support.units import KIB
from autotrain_mem.types import Plan

LARGE = "16GiB"
"""A card that holds the whole effective batch of every job."""
ROOMIER = 1.25
"""A card on which nothing fits is made so much larger, again and again."""
FILL = 0.93
"""What a plan is to take of the budget: the card is cut to that."""
BUDGET = 0.96
"""Of a small card, less the default headroom (``machine/overhead.py``)."""


def filled_card(workers: api.Workers, method: str, argv: Sequence[str], share: float) -> str:
    """As ``--gpu`` takes it. The plan that is best on a larger card is also the best on the smallest that holds it.

    Args:
        workers: Started where the job's files are.
        share: Of what the whole effective batch needs at once: what the larger card has.
    """
    size_bytes = int(share * _planned(workers, method, argv, LARGE).estimate.required_bytes)
    while True:
        try:
            needs_bytes = _planned(workers, method, argv, card_of(size_bytes)).estimate.required_bytes
            return card_of(int(needs_bytes / FILL / BUDGET))
        except DoesNotFitError:
            size_bytes = int(size_bytes * ROOMIER)


def card_of(size_bytes: int) -> str:
    """Of that size, in whole KiB."""
    return f"{-(-size_bytes // KIB)}KiB"


def _planned(workers: api.Workers, method: str, argv: Sequence[str], card: str) -> Plan:
    request, _ = flags.read(f"autofit {method}", [*argv, "--gpu", card])
    rehearsals = api.rehearsals_for(workers, request, print)
    return api.plan(rehearsals, to_train=True, simulate=True)
