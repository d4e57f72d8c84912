"""Says what a plan changes against the settings asked for, and why, with the numbers that decided it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autotrain_mem.methods.table import METHODS
from autotrain_mem.planner.ladder import lever_name
from autotrain_mem.planner.levels import levels
from autotrain_mem.planner.levers import (
    BATCHES,
    EXPANDABLE,
    LADDER,
    LEVERS,
    MICRO_BATCH,
    OFFLOADING,
    SHARDING,
    LeverRow,
)
from autotrain_mem.planner.memo import Memo
from autotrain_mem.planner.points import least_demanding
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Estimate, Harm, Knobs, Lever, Owner
from autotrain_mem.units import format_bytes


def changes(space: Space, knobs: Knobs, memo: Memo, *, too_slow: Sequence[Estimate] = ()) -> tuple[Lever, ...]:
    """Every difference between the plan and ``space.base``, in the ladder's order; empty when there is none.

    Args:
        too_slow: Plans of less harm that fit, and were passed over for their speed.

    Example: ``Lever(name="use_peft", before=False, after=True, harm=WHAT_IS_TRAINED, why="full fine-tuning needs at
    least 31.2 GiB, the budget is 11.1 GiB: a LoRA adapter is trained and the base model stays frozen")``.
    """
    moved = [row for row in LADDER if _value(row, space.base) != _value(row, knobs)]
    return tuple(
        Lever(
            name=lever_name(row),
            before=_value(row, space.base),
            after=_value(row, knobs),
            harm=Harm.NONE if _is_let_go(row, space.base, knobs) else row.harm,
            why=_why(row, space, knobs, memo, too_slow),
        )
        for row in moved
    )


def _value(row: LeverRow, knobs: Knobs) -> Any:
    """The knob's value; ``8 x 1`` (rows x accumulation steps) for the micro-batch."""
    values = [getattr(knobs, name) for name in row.knobs]
    return " x ".join(map(str, values)) if row.name == MICRO_BATCH else values[0]


def _is_let_go(row: LeverRow, base: Knobs, knobs: Knobs) -> bool:
    """Whether a lever of time is let go, not pulled, which does no harm: more rows at once, or no recomputation."""
    if row.name == MICRO_BATCH:
        return knobs.per_device_train_batch_size > base.per_device_train_batch_size
    return row.name == "gradient_checkpointing" and not knobs.gradient_checkpointing


def _why(row: LeverRow, space: Space, knobs: Knobs, memo: Memo, too_slow: Sequence[Estimate]) -> str:
    if _is_let_go(row, space.base, knobs):
        return row.let_go
    if row.name == SHARDING:
        return _why_shared(knobs, memo)
    if row.name == EXPANDABLE:
        estimate = memo(knobs)
        native = replace(estimate, knobs=replace(knobs, expandable_segments=False))
        needed = f"with segments of fixed size it needs {against(native.required_bytes, native.budget_bytes)}"
    elif row.name in OFFLOADING:
        needed = _needed_on_the_device(row, space, knobs, memo)
    elif row.without:
        needed = _needed_without(row, space, knobs, memo, too_slow)
    else:
        needed = _next_that_failed(space, knobs, memo) if row.name == MICRO_BATCH else ""
    drops = METHODS[space.method].drops_long_rows and row.name == "max_length"
    reason = "pairs with a side of more tokens are dropped" if drops else row.reason
    return f"{needed}: {reason}" if needed else reason


def _why_shared(knobs: Knobs, memo: Memo) -> str:
    """What each GPU holds of the model, and what is the matter with holding all of it."""
    shards, resharded = knobs.shards, knobs.sharding != "fsdp2-no-reshard"
    kept = "as it computes" if resharded else "once and kept from its forward to its backward pass"
    reason = (
        f"each GPU holds one of {shards} shards of weights, gradients and optimizer state; a layer is gathered {kept}"
    )
    chosen = memo(knobs)
    whole = [each for each in memo.estimates if each.knobs.sharding == "ddp" and _otherwise(each.knobs, knobs)]
    if fitting := [each.tokens_per_second for each in whole if each.fits and each.tokens_per_second]:
        return f"DDP fits too, at {max(fitting) / chosen.tokens_per_second:.2f} x the speed: {reason}"
    if whole:
        least = min(whole, key=lambda each: each.required_bytes)
        return f"DDP needs {against(least.required_bytes, least.budget_bytes)}: {reason}"
    held = chosen.memory.owners_at_peak
    static = sum(held.get(owner, 0) for owner in (Owner.WEIGHTS, Owner.GRADIENTS, Owner.OPTIMIZER_STATE)) * shards
    if static + chosen.outside_bytes <= chosen.budget_bytes:
        return reason
    return f"whole these take {against(static, chosen.budget_bytes)}: {reason}"


def _otherwise(one: Knobs, other: Knobs) -> bool:
    """Whether two points train the same, in the same precision and with the same optimizer."""
    names = ("use_peft", "base_bits", "dtype", "optim")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _next_that_failed(space: Space, knobs: Knobs, memo: Memo) -> str:
    """The next larger micro-batch, which was rehearsed and did not fit; empty where a larger one would be slower."""
    failed = [
        each
        for each in memo.estimates
        if not each.fits
        and _alike(each.knobs, knobs, but=())
        and each.knobs.per_device_train_batch_size > knobs.per_device_train_batch_size
    ]
    if not failed:
        return ""
    least = min(failed, key=lambda each: each.knobs.per_device_train_batch_size)
    return f"{_rows_need(space, least)} {against(least.required_bytes, least.budget_bytes)}"


def _alike(one: Knobs, other: Knobs, *, but: Sequence[str]) -> bool:
    """Whether two points differ in nothing but batches, segments and these knobs."""
    batches = [name for lever in BATCHES for name in LEVERS[lever].knobs]
    kept = {name: getattr(other, name) for name in (*batches, EXPANDABLE, *but)}
    return replace(one, **kept) == other


def _rows_need(space: Space, estimate: Estimate) -> str:
    """``4 pairs at once need``, ``1 pair at once needs``."""
    rows = estimate.knobs.per_device_train_batch_size
    return f"{METHODS[space.method].rows(rows)} at once {'need' if rows > 1 else 'needs'}"


def _needed_without(row: LeverRow, space: Space, knobs: Knobs, memo: Memo, too_slow: Sequence[Estimate]) -> str:
    """Says what every level without this lever needs at least, of those rehearsed before this one was reached."""
    if row.harm is Harm.ROUNDING and knobs.use_peft and not space.base.use_peft:
        return "the base model is frozen and loses no update to rounding"
    asked = _value(row, space.base)
    if passed := [estimate for estimate in too_slow if _value(row, estimate.knobs) == asked]:
        ratio = memo(knobs).tokens_per_second / max(estimate.tokens_per_second for estimate in passed)
        return f"without it a plan fits that takes {ratio:.1f} times as long"
    gentler = [
        level for level in levels(space) if level.harm < row.harm or level.harm is Harm.WHAT_IS_TRAINED is row.harm
    ]
    floors = memo.known([least_demanding(space, level) for level in gentler])
    tried = [floor for floor in floors if not floor.fits and _value(row, floor.knobs) == asked]
    if not tried:
        return ""
    least = min(tried, key=lambda estimate: estimate.required_bytes)
    return f"{row.without} at least {against(least.required_bytes, least.budget_bytes)}"


def _needed_on_the_device(row: LeverRow, space: Space, knobs: Knobs, memo: Memo) -> str:
    """The least that the same settings needed without the lever, or without others of time too, if that was seen."""
    without = [each for each in memo.estimates if not _value(row, each.knobs) and not each.fits]
    time = (*OFFLOADING, "gradient_checkpointing")
    alike = [each for each in without if _alike(each.knobs, knobs, but=time) and _pulled(each.knobs) < _pulled(knobs)]
    if not alike:
        return ""
    least = min(alike, key=lambda estimate: estimate.required_bytes)
    what = "it" if _pulled(least.knobs).intersection(OFFLOADING) else "offloading"
    return f"without {what} {_rows_need(space, least)} {against(least.required_bytes, least.budget_bytes)}"


def _pulled(knobs: Knobs) -> frozenset[str]:
    """The levers of time that a point has."""
    return frozenset(name for name in (*OFFLOADING, "gradient_checkpointing") if getattr(knobs, name))


def against(required_bytes: int, budget_bytes: int) -> str:
    """``31.2 GiB, the budget is 11.1 GiB``; where both would read the same, what is missing."""
    required, budget = format_bytes(required_bytes), format_bytes(budget_bytes)
    if required == budget:
        return f"{format_bytes(required_bytes - budget_bytes)} more than the budget of {budget}"
    return f"{required}, the budget is {budget}"
