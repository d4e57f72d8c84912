"""One job on many cards: for those who ask which one to rent or to buy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotrain_mem.spec.estimate import Estimate
from autotrain_mem.spec.hardware import Hardware

LOSSLESS = ("lossless", "lossless, offloading")
"""The levels that change nothing but speed, the faster first (``planner.levels``)."""

NOTHING_FITS = "nothing fits"


@dataclass(frozen=True, kw_only=True, slots=True)
class CardVerdict:
    """What one card can do for a job.

    >>> from autotrain_mem import CardVerdict, gpus
    >>> verdict = CardVerdict(hardware=gpus()[0], refusal="nothing fits")
    >>> verdict.estimate is None
    True
    """

    hardware: Hardware
    level: str = ""
    """The level of harm of its best plan; empty where nothing fits."""
    estimate: Estimate | None = None
    """Its best plan; None where nothing fits."""
    refusal: str = ""
    """Why there is none, in a sentence."""

    def to_json(self) -> dict[str, Any]:
        estimate = self.estimate
        return {
            "gpu": self.hardware.name,
            "total_bytes": self.hardware.total_bytes,
            "level": self.level or None,
            "knobs": None if estimate is None else estimate.knobs.to_json(),
            "required_bytes": None if estimate is None else estimate.required_bytes,
            "budget_bytes": None if estimate is None else estimate.budget_bytes,
            "step_seconds": None if estimate is None else estimate.time.to_json()["step_seconds"],
            "tokens_per_second": None if estimate is None else estimate.time.to_json()["tokens_per_second"],
            "refusal": self.refusal or None,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Cards:
    """All of them, smallest first.

    >>> from autotrain_mem import Cards, CardVerdict, gpus
    >>> Cards(verdicts=tuple(CardVerdict(hardware=card, refusal="nothing fits") for card in gpus())).smallest_lossless
    """

    verdicts: tuple[CardVerdict, ...]

    @property
    def smallest_lossless(self) -> CardVerdict | None:
        """The smallest card that trains what was asked for, unchanged; the fastest of those as small.

        One that must offload to do so counts only where none does without.
        """
        for level in LOSSLESS:
            if fitting := [each for each in self.verdicts if each.level == level]:
                return min(fitting, key=_size_then_speed)
        return None

    def to_json(self) -> dict[str, Any]:
        smallest = self.smallest_lossless
        return {
            "schema": "autofit.cards/1",
            "smallest_lossless": None if smallest is None else smallest.hardware.name,
            "cards": [verdict.to_json() for verdict in self.verdicts],
        }


def _size_then_speed(verdict: CardVerdict) -> tuple[int, float]:
    speed = 0.0 if verdict.estimate is None else verdict.estimate.tokens_per_second
    return verdict.hardware.total_bytes, -speed
