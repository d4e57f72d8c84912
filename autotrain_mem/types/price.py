"""A Price says what a card is rented for, by whom, and when that was seen."""

from __future__ import annotations

from dataclasses import dataclass

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Holds what one card costs for an hour.

    >>> from autotrain_mem import Price
    >>> Price(gpu="rtx4090", per_hour=0.34, provider="RunPod Community", seen="2026-03-10").cost(7200, cards=2)
    1.36
    """

    gpu: str
    """The catalog's key."""
    per_hour: float
    """Of one card, in ``currency``."""
    currency: str = "USD"
    provider: str = ""
    seen: str = ""
    """The day on which it was listed, as ``2026-03-10``; empty where that is not told."""
    source: str = ""
    """Where the list is."""

    def cost(self, seconds: float, *, cards: int = 1) -> float:
        """Computes what so many cards cost for so long, in ``currency``."""
        return self.per_hour * cards * seconds / SECONDS_PER_HOUR
