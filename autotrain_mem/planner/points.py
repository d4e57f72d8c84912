"""Points of the space: which knobs a rung may be rehearsed with, ordered by what they demand."""

from __future__ import annotations

from dataclasses import replace

from autotrain_mem.planner.ladder import LEVERS, Rung
from autotrain_mem.planner.space import Space, batch_splits
from autotrain_mem.spec import Knobs

RECOMPUTE_COST = 4 / 3
"""One more forward on top of a forward and a backward that costs two: Chen et al. 2016, arXiv 1604.06174."""
IDLE_TOKENS = 512
"""Micro-batch, in tokens, at which half of the time is taken as lost to an idle card. A stand-in, not measured."""


def relative_cost(space: Space, knobs: Knobs) -> float:
    """Cost of one token against an ideal one, for ranking plans. A stand-in until step time is modelled: not a time.

    Example: 4 rows of 1024 tokens with checkpointing cost 4/3 * (1 + 512/4096) = 1.5, 1 row without costs 1.5 too.
    """
    recompute = RECOMPUTE_COST if knobs.gradient_checkpointing else 1.0
    return recompute * (1 + IDLE_TOKENS / space.micro_batch_tokens(knobs))


def checkpointing_choices(space: Space) -> tuple[bool, ...]:
    """Values that gradient_checkpointing may take, the fastest first. Turning it off is no harm, so never forbidden."""
    lever = LEVERS["gradient_checkpointing"]
    if space.pinned.intersection(lever.knobs) or space.method not in lever.methods:
        return (space.base.gradient_checkpointing,)
    return (False,) if lever.name in space.forbid else (False, True)


def line(space: Space, setting: Knobs, *, checkpointing: bool) -> tuple[Knobs, ...]:
    """One setting at every micro-batch allowed, smallest first: what it needs grows along the line."""
    lever = LEVERS["micro_batch"]
    fixed = lever.name in space.forbid or space.method not in lever.methods
    smallest = space.base.per_device_train_batch_size if fixed else 1
    splits = [split for split in batch_splits(space)[::-1] if split.per_device_train_batch_size >= smallest]
    return tuple(split.of(replace(setting, gradient_checkpointing=checkpointing)) for split in splits)


def least_demanding(space: Space, rung: Rung) -> Knobs:
    """The point of a rung that needs least; if that does not fit, nothing on the rung does."""
    checkpointing = checkpointing_choices(space)[-1]
    smallest = line(space, rung.strongest, checkpointing=checkpointing)[0]
    return replace(smallest, max_length=rung.lengths[0]) if rung.lengths else smallest


def length_line(space: Space, rung: Rung) -> tuple[Knobs, ...]:
    """The least demanding point of a rung that shortens rows, at every length, and last at the length asked for."""
    shortest = least_demanding(space, rung)
    asked = rung.strongest.max_length
    return tuple(replace(shortest, max_length=length) for length in (*rung.lengths, asked))


def at(setting: Knobs, point: Knobs) -> Knobs:
    """A setting with the micro-batch and checkpointing of another point."""
    return replace(
        setting,
        per_device_train_batch_size=point.per_device_train_batch_size,
        gradient_accumulation_steps=point.gradient_accumulation_steps,
        gradient_checkpointing=point.gradient_checkpointing,
    )
