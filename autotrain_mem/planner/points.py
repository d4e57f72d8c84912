"""Points of the space: which knobs a rung may be rehearsed with, ordered by what they demand."""

from __future__ import annotations

from dataclasses import replace

from autotrain_mem.planner.ladder import FREE_ON_A_RUNG, LEVERS, Rung, allowed
from autotrain_mem.planner.space import BatchSplit, Space, batch_splits
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
    return tuple(_with_split(space, replace(setting, gradient_checkpointing=checkpointing), split) for split in splits)


def _with_split(space: Space, setting: Knobs, split: BatchSplit) -> Knobs:
    """The setting with this split, and with the other batches following its micro-batch where they may."""
    rows = split.per_device_train_batch_size
    followed = {name: min(getattr(space.base, name), rows) for name in _following(space, "eval_batch")}
    if rows < space.effective_batch_size:
        followed |= {name: min(getattr(space.base, name), rows) for name in _following(space, "rollout_batch")}
    return replace(split.of(setting), **followed)


def _following(space: Space, lever: str) -> tuple[str, ...]:
    """The lever's knobs, where the job has them and they may move."""
    row = LEVERS[lever]
    return tuple(name for name in row.knobs if allowed(row, space) and getattr(space.base, name) is not None)


def eased(space: Space, point: Knobs) -> tuple[Knobs, ...]:
    """The point itself, then with twice, four times ... the rows generated at once, and last with those asked for.

    Example: 2 rows of a rollout of 16, where TRL's default is 64: 2, 4, 8, and 64, which is the whole rollout.
    """
    points = [point]
    for name in _following(space, "rollout_batch"):
        asked, rows = getattr(space.base, name), getattr(point, name)
        while rows < asked:
            rows = 2 * rows if 2 * rows < min(asked, space.effective_batch_size) else asked
            points.append(replace(point, **{name: rows}))
    return tuple(points)


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
    """A setting with the batches and checkpointing of another point."""
    free = (name for lever in FREE_ON_A_RUNG for name in LEVERS[lever].knobs)
    return replace(setting, **{name: getattr(point, name) for name in free})
