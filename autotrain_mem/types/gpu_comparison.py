"""Defines the comparison of one job on many cards, to choose which one to rent or buy."""

from dataclasses import dataclass
from typing import ClassVar

from autotrain_mem.support.codec import Form
from autotrain_mem.support.lazy_names import ShownInNotebooks
from autotrain_mem.types.estimate import Estimate
from autotrain_mem.types.hardware import Hardware, Price

LOSSLESS = ("lossless", "lossless, precomputed reference", "lossless, offloading")
"""The names of the levels of harm that change nothing but speed, the faster one first (``search.levels``)."""
GIVING_UP = (*("lossless", "rounding", "LoRA", "LoRA on an 8-bit base", "QLoRA", "shorter rows"),)
"""The names of the levels of harm, least harm first (``search.levels``). What follows a comma does no more harm."""
NOTHING_FITS = "nothing fits"
TOO_SLOW = "takes too long"
TOO_DEAR = "costs too much"
TOO_LITTLE_HOST = "too little host memory"
NO_PRICE = "no price known"
BRIEF = (NOTHING_FITS, TOO_SLOW, TOO_DEAR, TOO_LITTLE_HOST, NO_PRICE)
"""The refusals that are short enough for a table cell."""
OFFLOADING = ", offloading"
"""The suffix of a level that offloads to host memory, and does no more harm than the level without the suffix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardVerdict:
    """Describes the best plan of a job on one card, or on several cards of one kind.

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
            "least_bytes": "least.required_bytes",
            "step_seconds": "estimate.time.known_step_seconds",
            "tokens_per_second": "estimate.time.known_tokens_per_second",
            "run_seconds": "run_seconds",
            "cost": "cost",
            "cost_per_million_tokens": "cost_per_million_tokens",
        },
        hidden=("hardware", "estimate", "least"),
    )

    hardware: Hardware
    level: str | None = None
    """The level of harm of its best plan; None if nothing fits."""
    estimate: Estimate | None = None
    """The card's best plan; None if nothing fits."""
    refusal: str | None = None
    """Why there is no plan, in a few words or a sentence; None if there is a plan."""
    least: Estimate | None = None
    """The least demanding settings, if nothing fits; None if the weights alone exceed the card."""
    nearest: str = ""
    """The flags with which the job would fit, if the card lacks little for ``least``; empty if there are none."""
    optimizer_steps: int | None = None
    """The optimizer steps of the whole training; None if neither the data nor ``max_steps`` determine them."""
    price: Price | None = None
    """The hourly rental price of one such card; None if unknown."""

    @property
    def run_seconds(self) -> float | None:
        """Computes the duration of the training in seconds; None if the steps or the card's speed are unknown."""
        if self.estimate is None or self.estimate.time.assumed or self.optimizer_steps is None:
            return None
        return self.estimate.time.of_run(self.optimizer_steps)

    @property
    def cost(self) -> float | None:
        """Computes the cost of the training on all of these cards, in the price's currency; None if unknown."""
        if self.price is None or self.run_seconds is None:
            return None
        return self.price.cost(self.run_seconds, cards=self.hardware.topology.processes)

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Computes the cost of training on a million tokens, in the price's currency; None if unknown."""
        speed = None if self.estimate is None else self.estimate.time.known_tokens_per_second
        if self.price is None or not speed:
            return None
        return self.price.cost(10**6 / speed, cards=self.hardware.topology.processes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cards(ShownInNotebooks):
    """Holds the verdicts on all compared cards, smallest first.

    >>> from autotrain_mem import Cards, CardVerdict, gpus
    >>> Cards(verdicts=tuple(CardVerdict(hardware=card, refusal="nothing fits") for card in gpus())).smallest_lossless
    """

    json_form: ClassVar = Form(
        schema="autofit.cards/1",
        derived={
            "smallest_lossless": "smallest_lossless.hardware.name",
            "cheapest": "cheapest.hardware.name",
            "fastest": "fastest.hardware.name",
            "best_value": "best_value.hardware.name",
            "cards": "verdicts",
        },
        hidden=("verdicts",),
    )

    verdicts: tuple[CardVerdict, ...]
    at_most: bool = False
    """Whether times and costs are the most: rows or completions may be shorter than the longest."""

    @property
    def priced(self) -> tuple[CardVerdict, ...]:
        """Lists the verdicts whose cost is known, the cheapest first."""
        known = [each for each in self.verdicts if each.cost_per_million_tokens is not None]
        return tuple(sorted(known, key=_cost))

    @property
    def comparable(self) -> tuple[CardVerdict, ...]:
        """Lists the priced verdicts at the least harmful level: a cheaper plan that does more harm is not compared."""
        least = min((_harm(each) for each in self.priced), default=0)
        return tuple(each for each in self.priced if _harm(each) == least)

    @property
    def cheapest(self) -> CardVerdict | None:
        """Returns the cheapest comparable card; None if no price is known."""
        return next(iter(self.comparable), None)

    @property
    def fastest(self) -> CardVerdict | None:
        """Returns the fastest comparable card; None if there is none."""
        return max(self.comparable, key=_speed, default=None)

    @property
    def best_value(self) -> CardVerdict | None:
        """Returns the comparable card with the least time x cost: twice the speed is worth up to twice the cost."""
        return min(self.comparable, key=lambda each: _cost(each) / _speed(each), default=None)

    @property
    def smallest_lossless(self) -> CardVerdict | None:
        """Returns the smallest set of cards that trains without harm; of equally small sets, the fastest.

        The size of a set is the memory of all its cards. Plans that offload count only if no other plan fits, and
        cards without a price only if no other card does.
        """
        for level in LOSSLESS:
            if fitting := [each for each in self.verdicts if each.level == level]:
                return min(
                    [each for each in fitting if each.price is not None] or fitting,
                    key=lambda each: (each.hardware.topology.processes * each.hardware.total_bytes, -_speed(each)),
                )
        return None


def _harm(verdict: CardVerdict) -> int:
    name = (verdict.level or "").partition(",")[0]
    return GIVING_UP.index(name) if name in GIVING_UP else len(GIVING_UP)


def _cost(verdict: CardVerdict) -> float:
    return verdict.cost_per_million_tokens or 0.0


def _speed(verdict: CardVerdict) -> float:
    return 0.0 if verdict.estimate is None else verdict.estimate.tokens_per_second


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestValue:
    """Holds the largest value of one setting that fits at the plan's level of harm, with all other flags as given."""

    name: str
    """The setting's name: one of ``types.job.MAXIMIZED``."""
    value: int
    next_value: int | None
    """The next larger value, which was rehearsed and does not fit; None if memory is not the limit."""
    next_required_bytes: int | None = None
    """The bytes that the next value needs; None if there is no next value."""
    stopped_by: str = ""
    """The limit other than memory, in a few words; empty if memory is the limit."""
