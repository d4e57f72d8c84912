"""Most says how much of one thing fits: the answer to ``--max_length max``, with its neighbour that does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autotrain_mem.support.codec import Form
from autotrain_mem.types.estimate import Candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class Most:
    """Holds the largest value of one setting that fits at a plan's level of harm, all that was asked for kept.

    >>> from autotrain_mem import Most
    >>> Most(name="max_length", value=2048, next_value=None, stopped_by="the model's context").value
    2048
    """

    name: str
    """The setting: one of ``types.job.MAXIMIZED``."""
    value: int
    next_value: int | None
    """The next larger one, which was rehearsed and does not fit; None where the card is not what stops it."""
    next_required_bytes: int | None = None
    """What that one needs."""
    stopped_by: str = ""
    """What else stops it, in a few words; empty where the card does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Says how far one level of harm reaches, and what it is there."""

    level: str
    most: Most | None = None
    """None where not even the smallest value fits."""
    point: Candidate | None = None
    """The settings with that value, which are the level's least demanding ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frontier:
    """Holds how much of one thing fits at each level of harm, least harm first."""

    json_form: ClassVar = Form(schema="autofit.frontier/1")

    name: str
    """The setting: one of ``types.job.MAXIMIZED``."""
    gpu: str
    budget_bytes: int
    reaches: tuple[Reach, ...]
