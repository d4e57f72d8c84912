"""Pulls levers: which ones a job allows, and what they make of the knobs asked for.

Forbidding a lever forbids its direction only, so ``--forbid gradient_checkpointing`` plans without recomputation and
``--forbid micro_batch`` never shrinks the micro-batch. A knob that the user gave is pinned: no lever on it is pulled,
whether allowed or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from autotrain_mem.search.precision import half_of, loses_nothing
from autotrain_mem.search.shardings import shardings
from autotrain_mem.search.space import Space
from autotrain_mem.settings.declaration import LeverRow
from autotrain_mem.settings.levers import HALF_WEIGHTS, LADDER, LEVERS, MICRO_BATCH, SHARDING
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Fit, Harm, Knobs
from autotrain_mem.types.methods_table import METHODS

FURTHEST: dict[Fit, Harm] = {"lossless": Harm.TIME, "rounding": Harm.ROUNDING, "all": Harm.DATA}
"""The last harm level that each ``--fit`` allows."""


def lever_name(row: LeverRow) -> str:
    """Names a lever as a plan calls it: by its knob, and by itself where it moves several (``micro_batch``)."""
    return row.name if row.name == MICRO_BATCH else row.knobs[0]


def harm_of(row: LeverRow, space: Space) -> Harm:
    """Returns the harm that a lever does in this job: none where it rounds weights that are frozen to the precision
    that they are saved in."""
    if row.name == HALF_WEIGHTS and loses_nothing(space.base, space.checkpoint_dtype):
        return Harm.NONE
    return row.harm


def check_forbid(names: Iterable[str]) -> frozenset[str]:
    """The names, if each is a lever: ``check_forbid(["lora"])``.

    Raises:
        UsageError: with the lever that was probably meant, for every unknown name at once.
    """
    names = frozenset(names)
    unknown = sorted(names - LEVERS.keys())
    if not unknown:
        return names
    meant = {  # the lever that moves the knob of this name, or else the one that is spelt most like it
        name: [row.name for row in LADDER if name in row.knobs] or get_close_matches(name, LEVERS, n=1, cutoff=0.5)
        for name in unknown
    }
    guesses = [f"--forbid {guesses[0]} instead of {name}" for name, guesses in meant.items() if guesses]
    did_you_mean = f"did you mean {', '.join(guesses)}?\n" if guesses else ""
    raise UsageError(
        f"--forbid knows no lever named {', '.join(unknown)}",
        hint=f"{did_you_mean}the levers are {', '.join(LEVERS)}",
    )


def allowed(row: LeverRow, space: Space) -> bool:
    """Whether this job's method, pins and limits let the lever be pulled."""
    return (
        row.suits(METHODS[space.method])
        and all(not _possible(name, space).isdisjoint(values) for name, values in row.needs.items())
        and all(_may_be_pulled(LEVERS[name], space) for name in row.along if LEVERS[name].harm == row.harm)
        and row.name not in space.forbid
        and not (space.is_quantized and row.quantizes)
        and harm_of(row, space) <= FURTHEST[space.fit]
        and space.pinned.isdisjoint(row.knobs)
    )


def _possible(name: str, space: Space) -> frozenset[Any]:
    """The values that a knob may have in this job, beside what other levers make of it."""
    return frozenset(shardings(space)) if name == SHARDING else frozenset({getattr(space.base, name)})


def pull_all(space: Space, names: Iterable[str]) -> Knobs:
    """The knobs asked for with these levers pulled, and with those that come along where they may."""
    knobs = space.base
    for row in (LEVERS[name] for name in names):
        for name in row.along:
            if allowed(LEVERS[name], space):
                knobs = _pull(LEVERS[name], knobs, space)
        knobs = _pull(row, knobs, space)
    return knobs


def moves(name: str, space: Space) -> bool:
    """Whether a lever may be pulled and would change anything."""
    return allowed(LEVERS[name], space) and _pull(LEVERS[name], space.base, space) != space.base


def _may_be_pulled(row: LeverRow, space: Space) -> bool:
    """Whether the lever is pulled already, or may be."""
    return _pull(row, space.base, space) == space.base or allowed(row, space)


def _pull(row: LeverRow, knobs: Knobs, space: Space) -> Knobs:
    to: Any = half_of(knobs) if row.name == HALF_WEIGHTS else row.to
    moved = {name: to for name in row.knobs if getattr(knobs, name) in row.moves_from}
    if not moved:
        return knobs
    kept = space.pinned.union(*(LEVERS[name].knobs for name in space.forbid))
    also = {name: value for name, value in row.also.items() if name not in kept}
    if row.turns_on_adapter and space.adapter is not None:
        also |= space.adapter.settings(space.pinned)
    return replace(knobs, **also, **moved)
