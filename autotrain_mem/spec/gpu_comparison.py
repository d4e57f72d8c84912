"""Cards compares one job on many cards, for those who ask which one to rent or to buy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autotrain_mem.spec.codec import Form
from autotrain_mem.spec.estimate import Estimate
from autotrain_mem.spec.hardware import Hardware

LOSSLESS = ("lossless", "lossless, offloading")
"""The levels that change nothing but speed, the faster first (``planner.levels``)."""

NOTHING_FITS = "nothing fits"


@dataclass(frozen=True, kw_only=True, slots=True)
class CardVerdict:
    """Says what one card, or several of it, can do for a job.

    >>> from autotrain_mem import CardVerdict, gpus
    >>> verdict = CardVerdict(hardware=gpus()[0], refusal="nothing fits")
    >>> verdict.estimate is None
    True
    """

    json_form: ClassVar = Form(
        derived={
            "gpu": "hardware.name",
            "gpus": "hardware.topology.devices",
            "nodes": "hardware.topology.nodes",
            "total_bytes": "hardware.total_bytes",
            "knobs": "estimate.knobs",
            "required_bytes": "estimate.required_bytes",
            "budget_bytes": "estimate.budget_bytes",
            "step_seconds": "estimate.time.known_step_seconds",
            "tokens_per_second": "estimate.time.known_tokens_per_second",
        },
        hidden=("hardware", "estimate"),
    )

    hardware: Hardware
    level: str | None = None
    """The level of harm of its best plan; None where nothing fits."""
    estimate: Estimate | None = None
    """Its best plan; None where nothing fits."""
    refusal: str | None = None
    """Why there is none, in a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cards:
    """Holds the verdicts of all sets of cards, smallest first.

    >>> from autotrain_mem import Cards, CardVerdict, gpus
    >>> Cards(verdicts=tuple(CardVerdict(hardware=card, refusal="nothing fits") for card in gpus())).smallest_lossless
    """

    json_form: ClassVar = Form(
        schema="autofit.cards/1",
        derived={"smallest_lossless": "smallest_lossless.hardware.name", "cards": "verdicts"},
        hidden=("verdicts",),
    )

    verdicts: tuple[CardVerdict, ...]

    @property
    def smallest_lossless(self) -> CardVerdict | None:
        """Finds the smallest set of cards that trains what was asked for, unchanged; the fastest of those as small.

        The size of a set is the memory of all its cards.

        One that must offload to do so counts only where none does without.
        """
        for level in LOSSLESS:
            if fitting := [each for each in self.verdicts if each.level == level]:
                return min(fitting, key=_size_then_speed)
        return None


def _size_then_speed(verdict: CardVerdict) -> tuple[int, float]:
    speed = 0.0 if verdict.estimate is None else verdict.estimate.tokens_per_second
    return verdict.hardware.topology.processes * verdict.hardware.total_bytes, -speed
