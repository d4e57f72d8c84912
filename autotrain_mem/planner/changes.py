"""What a plan changes against the settings asked for, and why, with the numbers that decided it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autotrain_mem.planner.ladder import EXPANDABLE, LADDER, LadderRow, rungs
from autotrain_mem.planner.memo import Memo
from autotrain_mem.planner.points import least_demanding
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Attempt, Harm, Knobs, Lever
from autotrain_mem.spec.job import ROW_NOUNS
from autotrain_mem.units import format_bytes

MICRO_BATCH = "micro_batch"

_WITHOUT = {
    "bf16_weights": "without rounding it needs",
    "8bit_optimizer": "without rounding it needs",
    "lora": "full fine-tuning needs",
    "8bit_base": "LoRA on a base that is not quantized needs",
    "4bit_base": "LoRA without a 4-bit base needs",
    "max_length": "the length asked for needs",
    "activation_offloading": "without offloading it needs",
    "optimizer_offload": "without offloading it needs",
}
"""What the least demanding point without the lever stands for."""


_REASON_OF = {("reward", "max_length"): "pairs with a side of more tokens are dropped"}
"""What a lever does in a method that goes its own way."""


def changes(space: Space, knobs: Knobs, memo: Memo) -> tuple[Lever, ...]:
    """Every difference between the plan and ``space.base``, in the ladder's order; empty when there is none.

    Example: ``Lever(name="use_peft", before=False, after=True, harm=WHAT_IS_TRAINED, why="full fine-tuning needs at
    least 31.2 GiB, the budget is 11.1 GiB: a LoRA adapter is trained and the base model stays frozen")``.
    """
    moved = [row for row in LADDER if _value(row, space.base) != _value(row, knobs)]
    return tuple(
        Lever(
            name=row.name if row.name == MICRO_BATCH else row.knobs[0],
            before=_value(row, space.base),
            after=_value(row, knobs),
            harm=_harm(row, space.base, knobs),
            why=_why(row, space, knobs, memo),
        )
        for row in moved
    )


def _value(row: LadderRow, knobs: Knobs) -> Any:
    """The knob's value; ``8 x 1`` (rows x accumulation steps) for the micro-batch."""
    values = [getattr(knobs, name) for name in row.knobs]
    return " x ".join(map(str, values)) if row.name == MICRO_BATCH else values[0]


def _harm(row: LadderRow, base: Knobs, knobs: Knobs) -> Harm:
    """A lever of time let go, not pulled, does no harm: a larger micro-batch, or no recomputation."""
    return Harm.NONE if _is_let_go(row, base, knobs) else row.harm


def _is_let_go(row: LadderRow, base: Knobs, knobs: Knobs) -> bool:
    let_go = {
        MICRO_BATCH: knobs.per_device_train_batch_size > base.per_device_train_batch_size,
        "gradient_checkpointing": not knobs.gradient_checkpointing,
    }
    return let_go.get(row.name, False)


def _why(row: LadderRow, space: Space, knobs: Knobs, memo: Memo) -> str:
    if _is_let_go(row, space.base, knobs):
        return _why_let_go(row)
    if row.name == EXPANDABLE:
        estimate = memo(knobs)
        native = replace(estimate, knobs=replace(knobs, expandable_segments=False))
        needed = f"with segments of fixed size it needs {_against(native.required_bytes, native.budget_bytes)}"
    elif row.name in _WITHOUT:
        needed = _needed_without(row, space, knobs, memo)
    else:
        needed = _next_that_failed(space, knobs, memo.attempts) if row.name == MICRO_BATCH else ""
    reason = _REASON_OF.get((space.method, row.name), row.reason)
    return f"{needed}: {reason}" if needed else reason


def _why_let_go(row: LadderRow) -> str:
    if row.name == MICRO_BATCH:
        return "more rows at once fit, with less accumulation: the same optimizer steps in less time"
    return "the activations fit without recomputing them, which is faster"


_COMPARED = (
    *("gradient_checkpointing", "max_length", "use_peft", "load_in_8bit", "load_in_4bit"),
    *("activation_offloading", "optimizer_offload"),
)
"""What two attempts must share to differ by their micro-batch; rounding is left out, of which a plan may take less."""


def _next_that_failed(space: Space, knobs: Knobs, attempts: tuple[Attempt, ...]) -> str:
    """The next larger micro-batch, which was rehearsed and did not fit; empty where the search had no need to try."""
    larger = [
        attempt
        for attempt in attempts
        if not attempt.fits
        and all(getattr(attempt.knobs, name) == getattr(knobs, name) for name in _COMPARED)
        and attempt.knobs.per_device_train_batch_size > knobs.per_device_train_batch_size
    ]
    if not larger:
        return ""
    failed = min(larger, key=lambda attempt: (attempt.knobs.per_device_train_batch_size, attempt.required_bytes))
    rows = f"{failed.knobs.per_device_train_batch_size} {ROW_NOUNS.get(space.method, 'rows')}"
    return f"{rows} at once need {_against(failed.required_bytes, failed.budget_bytes)}"


def _needed_without(row: LadderRow, space: Space, knobs: Knobs, memo: Memo) -> str:
    """What every rung without this lever needs at least, of those that were rehearsed before this one was climbed."""
    if row.harm is Harm.ROUNDING and knobs.use_peft and not space.base.use_peft:
        return "the base model is frozen and loses no update to rounding"
    asked = _value(row, space.base)
    without = [least_demanding(space, rung) for rung in rungs(space)]
    tried = [memo(point) for point in without if _value(row, point) == asked and memo.knows(point)]
    least = min(tried, key=lambda estimate: estimate.required_bytes)
    return f"{_WITHOUT[row.name]} at least {_against(least.required_bytes, least.budget_bytes)}"


def _against(required_bytes: int, budget_bytes: int) -> str:
    return f"{format_bytes(required_bytes)}, the budget is {format_bytes(budget_bytes)}"
