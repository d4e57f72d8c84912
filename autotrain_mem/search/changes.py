"""Lists a plan's changes to the requested settings, each with a measured reason.

The reason compares the plan with a rehearsal that lacks just this change, or that saves more elsewhere.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autotrain_mem.search.adapter import ADAPTED, ONLY_ATTENTION
from autotrain_mem.search.explore import TIE
from autotrain_mem.search.guess import static_bytes
from autotrain_mem.search.levels import harm_of, levels, lever_name
from autotrain_mem.search.memo import Memo
from autotrain_mem.search.space import Space, half_of
from autotrain_mem.settings import levers
from autotrain_mem.settings.declaration import LeverRow
from autotrain_mem.settings.words import CHECKPOINTING, MAX_LENGTH
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import METHODS, Estimate, Harm, Knobs, Lever


def changes(space: Space, knobs: Knobs, memo: Memo, *, too_slow: Sequence[Estimate] = ()) -> tuple[Lever, ...]:
    """Returns every difference between the plan and ``space.base``, in the order of ``LADDER``.

    ``too_slow`` are plans of less harm that fit, and were passed over for their speed.

    Example: ``Lever(name="use_peft", before=False, after=True, harm=WHAT_IS_TRAINED, why="full fine-tuning needs at
    least 31.2 GiB, the budget is 11.1 GiB: a LoRA adapter is trained and the base model stays frozen")``.
    """
    base, adapter, along = space.base, space.adapter, levers.brought(space.base, knobs)
    told = []
    for row in levers.LADDER:
        before, after = _value(row, base), _value(row, knobs)
        if before == after or not along.isdisjoint(row.knobs):
            continue
        is_harmless = _is_reversed(row, base, knobs) or _rounds_nothing(row, space, knobs)
        harm = Harm.NONE if is_harmless else harm_of(row, space)
        why = _why(row, space, knobs, memo, too_slow)
        told.append(Lever(name=lever_name(row), before=before, after=after, harm=harm, why=why))
    of_adapter = []
    if adapter is not None and knobs.use_peft:
        why_adapter, rank = dict(adapter.why), adapter.lora_r
        if knobs.lora_target_parameters != adapter.lora_target_parameters:
            rank, larger = adapter.layers_rank, [each for each in memo.estimates if each.knobs.lora_target_parameters]
            alike = [each for each in larger if not each.fits and each.knobs.base_bits == knobs.base_bits]
            needed = f"with adapted experts it needs at least {_least(alike, knobs)}; " if alike else ""
            why_adapter["lora_r"] = adapter.why["layers_rank"]
            why_adapter["lora_target_modules"] = f"{needed}all attention layers{ONLY_ATTENTION}"
        if knobs.lora_r < rank:
            larger = [each for each in memo.estimates if not each.fits and each.knobs.lora_r == rank]
            alike = [each for each in larger if each.knobs.training == knobs.training]
            needed = f"rank {rank} needs at least {_least(alike, knobs)}: " if alike else ""
            why_adapter["lora_r"] = f"{needed}the data need a larger rank, but it does not fit"
        moved = [(name, getattr(base, name), getattr(knobs, name)) for name in ADAPTED]
        of_adapter = [
            Lever(name=name, before=before, after=after, harm=Harm.WHAT_IS_TRAINED, why=why_adapter[name])
            for name, before, after in moved
            if before != after
        ]
    cut = [lever for lever in told if lever.harm is Harm.DATA]
    return (*(lever for lever in told if lever not in cut), *of_adapter, *cut)


def _rounds_nothing(row: LeverRow, space: Space, knobs: Knobs) -> bool:
    return (
        row.name == levers.HALF_WEIGHTS and knobs.use_peft and space.checkpoint_dtype == knobs.dtype == half_of(knobs)
    )


def _value(row: LeverRow, knobs: Knobs) -> Any:
    """Returns the knob's value; ``8 x 1`` (rows x accumulation steps) for the micro-batch."""
    values = [getattr(knobs, name) for name in row.knobs]
    return " x ".join(map(str, values)) if row.name == levers.MICRO_BATCH else values[0]


def _is_reversed(row: LeverRow, base: Knobs, knobs: Knobs) -> bool:
    """Returns whether a lever that costs time is released: a larger micro-batch, or no recomputation."""
    if row.name == levers.MICRO_BATCH:
        return knobs.per_device_train_batch_size > base.per_device_train_batch_size
    return row.name == CHECKPOINTING and not knobs.recomputes


SAVED_SO = (
    "the base model is frozen and was saved in this precision, so no weight is rounded; activations between layers "
    "have it too, as when the model was trained"
)


def _why(row: LeverRow, space: Space, knobs: Knobs, memo: Memo, too_slow: Sequence[Estimate]) -> str:
    if _is_reversed(row, space.base, knobs):
        return row.if_reversed
    if row.name == levers.SHARDING:
        return _why_shared(knobs, memo)
    if row.name == levers.EXPANDABLE:
        native = replace(memo(knobs), knobs=knobs.growing(False))
        is_later = native.reserved_bytes > native.reserved.peak_reserved_bytes
        hours = ", over hours with rows of every length," if is_later else ""
        needed = f"with {native.knobs.segments}{hours} it needs {against(native.required_bytes, native.budget_bytes)}"
    elif row.name == levers.MICRO_BATCH:
        needed = _why_no_more_rows(space, knobs, memo)
    else:
        needed = _needed_without(row, space, knobs, memo, too_slow)
    reason = row.reason
    if _rounds_nothing(row, space, knobs):
        reason = SAVED_SO
    elif row.name == levers.HALF_WEIGHTS and knobs.use_peft:
        reason = "its weights take half the bytes: they are rounded once, as they are loaded"
    elif METHODS[space.method].long_rows == "dropped" and row.name == MAX_LENGTH:
        reason = "pairs with a side of more tokens are dropped"
    return f"{needed}: {reason}" if needed else reason


def _why_shared(knobs: Knobs, memo: Memo) -> str:
    """Describes each GPU's share of the model, and why it does not hold all of it."""
    shards, resharded = knobs.shards, knobs.sharding != "fsdp2-no-reshard"
    kept = "as it computes" if resharded else "once and kept from its forward to its backward pass"
    reason = (
        f"each GPU holds one of {shards} shards of weights, gradients and optimizer state; a layer is gathered {kept}"
    )
    chosen = memo(knobs)
    whole = [each for each in memo.estimates if each.knobs.sharding == "ddp" and each.knobs.training == knobs.training]
    if fitting := [each.tokens_per_second for each in whole if each.fits and each.tokens_per_second]:
        return f"DDP fits too, at {max(fitting) / chosen.tokens_per_second:.2f} x the speed: {reason}"
    if whole:
        return f"DDP needs {_least(whole, knobs)}: {reason}"
    static = static_bytes(chosen) * shards
    if static + chosen.outside_bytes <= chosen.budget_bytes:
        return reason
    return f"all shards together need {against(static, chosen.budget_bytes)}: {reason}"


def _why_no_more_rows(space: Space, knobs: Knobs, memo: Memo) -> str:
    """Describes the next larger micro-batch that was rehearsed; empty without one."""
    larger = [each for each in memo.estimates if _rows(each) > knobs.per_device_train_batch_size]
    alike = sorted((each for each in larger if _alike(each.knobs, knobs, but=())), key=_rows)
    if failed := [each for each in alike if not each.fits]:
        return f"{_rows_need(space, failed[0])} {_against(failed[0], knobs)}"
    return f"a micro-batch of {METHODS[space.method].rows(_rows(alike[0]))} fits and is no faster" if alike else ""


def _alike(one: Knobs, other: Knobs, *, but: Sequence[str]) -> bool:
    """Returns whether two points differ only in batches, expandable segments and the knobs in ``but``."""
    batches = [name for lever in levers.BATCHES for name in levers.LEVERS[lever].knobs]
    kept = {name: getattr(other, name) for name in (*batches, levers.EXPANDABLE, *but)}
    return replace(one, **kept) == other


def _rows(estimate: Estimate) -> int:
    return estimate.knobs.per_device_train_batch_size


def _rows_need(space: Space, estimate: Estimate) -> str:
    """Returns ``a micro-batch of 4 pairs needs``."""
    return f"a micro-batch of {METHODS[space.method].rows(_rows(estimate))} needs"


def _needed_without(row: LeverRow, space: Space, knobs: Knobs, memo: Memo, too_slow: Sequence[Estimate]) -> str:
    """Describes the memory or speed without a lever, as rehearsed; empty if no rehearsal shows it."""
    # First, the plan with just this change taken back.
    without = levers.taken_back(row, knobs, space.base)
    found = next(iter(memo.known([without])), None) if without is not None else None
    if found is not None and not found.fits:
        return f"without it {_rows_need(space, found)} {_against(found, knobs)}"
    ratio = found.tokens_per_second / memo(knobs).tokens_per_second if found and found.tokens_per_second else 1.0
    if ratio < 1 - TIE:
        return f"without it the plan fits at {ratio:.2f} x the speed"
    if harm_of(row, space) <= Harm.TIME:  # compare with settings that lack only this lever, with no more rows
        time = (*levers.OFFLOADING, CHECKPOINTING)
        others = {name for name in time if getattr(knobs, name)} - {row.knobs[0]}
        alike = [
            each
            for each in memo.estimates
            if not (_value(row, each.knobs) or each.fits)
            and _alike(each.knobs, knobs, but=(*time, *row.knobs))
            and all(getattr(each.knobs, name) for name in others)
            and _rows(each) <= knobs.per_device_train_batch_size
        ]
        if not alike:
            return ""
        least = min(alike, key=lambda estimate: estimate.required_bytes)
        return f"without it {_rows_need(space, least)} {_against(least, knobs)}"
    if not row.without:
        return ""
    if row.harm is Harm.ROUNDING and knobs.use_peft and not space.base.use_peft:
        return "" if _rounds_nothing(row, space, knobs) else "the base model is frozen and loses no update to rounding"
    asked = _value(row, space.base)
    if passed := [estimate for estimate in too_slow if _value(row, estimate.knobs) == asked]:
        ratio = memo(knobs).tokens_per_second / max(estimate.tokens_per_second for estimate in passed)
        return f"without it a plan fits that takes {ratio:.1f} times as long"
    gentler = [
        level for level in levels(space) if level.harm < row.harm or level.harm is Harm.WHAT_IS_TRAINED is row.harm
    ]
    floors = memo.known([floor for level in gentler for floor in level.floors])
    tried = [floor for floor in floors if not floor.fits and _value(row, floor.knobs) == asked]
    return f"{row.without} at least {_least(tried, knobs)}" if tried else ""


def _least(estimates: Sequence[Estimate], knobs: Knobs) -> str:
    return _against(min(estimates, key=lambda estimate: estimate.required_bytes), knobs)


def _against(estimate: Estimate, knobs: Knobs) -> str:
    """Returns need and budget, with the kind of segments if it is not that of the plan's ``knobs``."""
    segments = "" if estimate.knobs.segments == knobs.segments else estimate.segments
    return against(estimate.required_bytes, estimate.budget_bytes, segments)


def against(required_bytes: int, budget_bytes: int, segments: str = "") -> str:
    """Returns ``31.2 GiB, the budget is 11.1 GiB``, or the missing bytes if both would read the same."""
    required, budget = format_bytes(required_bytes), format_bytes(budget_bytes)
    if required == budget:
        return f"{format_bytes(required_bytes - budget_bytes)} more than the budget of {budget}"
    return f"{required}{segments}, the budget is {budget}"
