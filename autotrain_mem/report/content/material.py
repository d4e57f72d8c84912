"""Holds all that a page is built of: what was planned, what ran, and what could not be found."""

from __future__ import annotations

from dataclasses import dataclass

from autotrain_mem.types import Hardware, Plan, Report
from autotrain_mem.types.data import DataProfile
from autotrain_mem.types.history import RunHistory
from autotrain_mem.types.page import Timeline
from autotrain_mem.types.price import Price


@dataclass(frozen=True, kw_only=True, slots=True)
class CardOffer:
    """Says whether one known card holds a plan's settings, and what it is rented for."""

    hardware: Hardware
    required_bytes: int
    budget_bytes: int
    price: Price | None

    @property
    def fits(self) -> bool:
        return self.required_bytes <= self.budget_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """Holds a plan and whatever is known beside it."""

    plan: Plan
    command: str
    """By which it can be made again."""
    made: str = ""
    timelines: tuple[Timeline, ...] = ()
    report: Report | None = None
    """Of the run that trained with it, once it has ended."""
    history: RunHistory | None = None
    profile: DataProfile | None = None
    """How many rows there are of each length; None where that was not kept."""
    cards: tuple[CardOffer, ...] = ()
    not_shown: tuple[str, ...] = ()
