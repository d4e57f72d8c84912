"""Finds by how many GPUs rows must be shared for a plan that costs nothing but time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autotrain_mem.planning.lengths import Lengths
from autotrain_mem.planning.predictions import Predictions
from autotrain_mem.planning.rehearsals import Rehearsals
from autotrain_mem.search.levels import LEVELS
from autotrain_mem.search.search import Found, Limits, find
from autotrain_mem.search.shardings import SharedTokens, degrees, way_of
from autotrain_mem.search.space import Space
from autotrain_mem.settings.levers import LEVERS
from autotrain_mem.support.errors import RehearsalError
from autotrain_mem.types import Candidate, Footprint, Lever
from autotrain_mem.types.model import ModelFacts

FLASH_CAPABILITY = (8, 0)
"""Of the oldest cards with the kernels that ring attention takes (``rehearsal.cuda.attention_kernels``)."""


def with_shared_tokens(
    rehearsals: Rehearsals,
    facts: ModelFacts,
    lengths: Lengths,
    space: Space,
    limits: Limits,
    on_attempt: Callable[[Candidate], None],
    footprints: dict[Any, Footprint] | None,
) -> Found | None:
    """The plan of the fewest GPUs that share a row and hold it without harm; None where it is not to be tried, where
    GPUs that share none hold it, and where not even all of them do.

    Example: rows of 131,072 tokens on 8 GPUs: 1, 2, 4 and 8 are tried, and the first that fits is taken. What was tried
    before stands among the plan's attempts.
    """
    sizes, way = degrees(space, rehearsals.job), way_of(rehearsals.job)
    if not sizes or (way.in_half_precision and rehearsals.hardware.capability < FLASH_CAPABILITY):
        return None
    tried: tuple[Candidate, ...] = ()

    def hear(attempt: Candidate) -> None:
        nonlocal tried
        tried += (attempt,)
        on_attempt(attempt)

    for size in (1, *sizes):
        alike = _sharing(rehearsals, way, size, space.effective_batch_size)
        others = alike.space(facts, lengths)
        try:
            found = find(others, Predictions(alike, facts, lengths, footprints), hear, limits)
        except RehearsalError:
            if size == 1:
                raise
            return None  # this model's attention cannot be shared; the search without goes on
        if found is not None and found.level == LEVELS[0].name:
            return None if size == 1 else replace(found, attempts=tried, levers=(*found.levers, _lever(way, size)))
    return None


def _sharing(rehearsals: Rehearsals, way: SharedTokens, size: int, effective_batch_size: int) -> Rehearsals:
    """The same job, with nothing but time to lose, and rows that so many share."""
    job, defaults = rehearsals.job, rehearsals.defaults
    arguments = {**job.arguments, **({way.name: size} if size > 1 else {})}
    forbid = job.forbid | {name for name, row in LEVERS.items() if row.offloads}
    harmless = replace(
        job, arguments=arguments, fit="lossless", forbid=forbid, effective_batch_size=effective_batch_size
    )
    sizes: dict[str, Any] = {way.name: size}
    sharding = way.shardings[-1] if size > 1 else defaults.sharding
    return replace(rehearsals, job=harmless, defaults=replace(defaults, sharding=sharding, **sizes))


def _lever(way: SharedTokens, size: int) -> Lever:
    row = LEVERS[way.name]
    return Lever(name=row.name, before=1, after=size, harm=row.harm, why=row.reason)
