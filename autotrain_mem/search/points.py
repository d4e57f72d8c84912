"""Points of the space: which knobs a level may be rehearsed with, ordered by what they demand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from autotrain_mem.search.ladder import allowed
from autotrain_mem.search.levels import Level
from autotrain_mem.search.shardings import least_shared, shared
from autotrain_mem.search.space import Space, micro_batches, with_rows
from autotrain_mem.settings.levers import FREE, LEVERS
from autotrain_mem.types import Knobs
from autotrain_mem.types.methods_table import METHODS

Line = tuple[Knobs, ...]
"""One setting, shared in one way, with or without checkpointing, at every micro-batch allowed, smallest first: what it
needs grows along the line, but for its end, where the whole batch is one micro-batch. Nothing is accumulated there, and
no gradients are held when a forward pass begins."""


def checkpointing_choices(space: Space) -> tuple[bool, ...]:
    """Values that gradient_checkpointing may take, the fastest first. Turning it off is no harm, so never forbidden."""
    lever = LEVERS["gradient_checkpointing"]
    if space.pinned.intersection(lever.knobs) or not lever.suits(METHODS[space.method]):
        return (space.base.gradient_checkpointing,)
    return (False,) if lever.name in space.forbid else (False, True)


def lines(space: Space, level: Level) -> Iterator[Line]:
    """Every line of a level, fewest levers of time first."""
    for setting in level.settings:
        for way in shared(space, setting):
            for checkpointing in checkpointing_choices(space):
                yield line(space, way, checkpointing=checkpointing)


@lru_cache(maxsize=256)  # as many as one search has
def line(space: Space, setting: Knobs, *, checkpointing: bool) -> Line:
    """One setting at every micro-batch allowed."""
    lever = LEVERS["micro_batch"]
    fixed = lever.name in space.forbid or not lever.suits(METHODS[space.method])
    smallest = space.base.per_device_train_batch_size if fixed else 1
    chosen = replace(setting, gradient_checkpointing=checkpointing)
    return tuple(_at_rows(space, chosen, rows) for rows in micro_batches(space)[::-1] if rows >= smallest)


def _at_rows(space: Space, setting: Knobs, rows: int) -> Knobs:
    """The setting at a micro-batch, and with the other batches following it where they may."""
    followed = {name: min(getattr(space.base, name), rows) for name in _following(space, "eval_batch")}
    if rows < space.share:
        followed |= {name: min(getattr(space.base, name), rows) for name in _following(space, "rollout_batch")}
    return replace(with_rows(setting, rows), **followed)


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
            rows = 2 * rows if 2 * rows < min(asked, space.share) else asked
            points.append(replace(point, **{name: rows}))
    return tuple(points)


def least_demanding(space: Space, level: Level) -> Knobs:
    """The point of a level that needs least; if that does not fit, nothing on the level does, unless it be
    :func:`unaccumulated`."""
    smallest = _least_line(space, level)[0]
    return replace(smallest, max_length=level.lengths[0]) if level.lengths else smallest


def unaccumulated(space: Space, level: Level) -> Knobs:
    """The same in one micro-batch: it holds more activations and, until its backward pass makes them, no gradients."""
    whole = _least_line(space, level)[-1]
    return replace(whole, max_length=level.lengths[0]) if level.lengths else whole


def floors_of(space: Space, level: Level) -> tuple[Knobs, Knobs]:
    """Both of them: one needs the least of the level."""
    return least_demanding(space, level), unaccumulated(space, level)


def _least_line(space: Space, level: Level) -> Line:
    setting = least_shared(space, level.strongest)
    return line(space, setting, checkpointing=checkpointing_choices(space)[-1])


def most_demanding(space: Space, level: Level) -> Knobs:
    """The point of a level with the fewest levers and the most rows at once; if it fits, there is little to search.

    Of several processes that with the smallest shards: it tells what larger ones and whole models need.
    """
    return line(space, least_shared(space, level.gentlest), checkpointing=checkpointing_choices(space)[0])[-1]


def length_lines(space: Space, level: Level) -> tuple[Line, Line]:
    """The least demanding point of a level that shortens rows, at every length, and last at the length asked for; and
    the same of the whole batch at once."""
    lengths = (*level.lengths, level.strongest.max_length)
    least, at_once = (
        tuple(replace(shortest, max_length=length) for length in lengths)
        for shortest in (least_demanding(space, level), unaccumulated(space, level))
    )
    return least, at_once


def at(setting: Knobs, point: Knobs) -> Knobs:
    """A setting with the batches and checkpointing of another point; its processes share the model as they did."""
    free = (name for lever in FREE for name in LEVERS[lever].knobs)
    return replace(setting, **{name: getattr(point, name) for name in free})
