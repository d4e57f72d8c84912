"""Finds by how many GPUs rows must be shared for a plan that costs nothing but time (context parallelism)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autotrain_mem.engine.predict.predictions import Predictions
from autotrain_mem.engine.rehearsals import Lengths, Rehearsals
from autotrain_mem.errors import RehearsalError
from autotrain_mem.planner.levels import LEVELS
from autotrain_mem.planner.levers import LEVERS, SHARED_TOKENS
from autotrain_mem.planner.search import Found, Limits, find
from autotrain_mem.planner.shared_tokens import degrees
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Candidate, Footprint, Lever
from autotrain_mem.spec.model import ModelFacts

FLASH_CAPABILITY = (8, 0)
"""Ring attention takes kernels that older cards have not (``rehearsal.cuda.attention_choice``)."""


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
    sizes = degrees(space, rehearsals.job)
    if not sizes or rehearsals.compute_capability < FLASH_CAPABILITY:
        return None
    tried: tuple[Candidate, ...] = ()

    def hear(attempt: Candidate) -> None:
        nonlocal tried
        tried += (attempt,)
        on_attempt(attempt)

    for size in (1, *sizes):
        alike = _sharing(rehearsals, size, space.effective_batch_size)
        others = alike.space(facts, lengths)
        try:
            found = find(others, Predictions(alike, facts, lengths, footprints), hear, limits)
        except RehearsalError:
            if size == 1:
                raise
            return None  # this model's attention cannot be shared; the search without goes on
        if found is not None and found.level == LEVELS[0].name:
            return None if size == 1 else replace(found, attempts=tried, levers=(*found.levers, _lever(size)))
    return None


def _sharing(rehearsals: Rehearsals, size: int, effective_batch_size: int) -> Rehearsals:
    """The same job, with nothing but time to lose, and rows that so many share."""
    job, defaults = rehearsals.job, rehearsals.defaults
    arguments = {**job.arguments, **({SHARED_TOKENS: size} if size > 1 else {})}
    forbid = job.forbid | {name for name, row in LEVERS.items() if row.offloads}
    harmless = replace(
        job, arguments=arguments, fit="lossless", forbid=forbid, effective_batch_size=effective_batch_size
    )
    return replace(
        rehearsals,
        job=harmless,
        defaults=replace(defaults, cp_size=size, sharding="fsdp2" if size > 1 else defaults.sharding),
    )


def _lever(size: int) -> Lever:
    row = LEVERS[SHARED_TOKENS]
    return Lever(name=row.name, before=1, after=size, harm=row.harm, why=row.reason)
