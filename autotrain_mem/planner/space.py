"""Holds what the search may move: the settings asked for, what is pinned, and how the effective batch may be split.

Lengths are tokens, batch sizes are rows on one device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from autotrain_mem.errors import BatchSplitError, ContextLengthError
from autotrain_mem.planner.division import (
    EVALUATED_ROWS,
    ROWS,
    STEPS,
    check_positive,
    divisors,
    either,
    multiples,
    nearest,
    rows_allowed,
)
from autotrain_mem.spec import Fit, Job, Knobs
from autotrain_mem.spec.job import MAX_SLOWDOWN
from autotrain_mem.spec.length import without_wish
from autotrain_mem.spec.model import ModelFacts

UNKNOWN_ROW_TOKENS = 1024
"""TRL 1.12's default ``max_length`` (``SFTConfig``), taken where neither rows nor model say how long a row gets. It
only ranks plans and guides the search; what fits is always rehearsed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Everything the search needs to know of a job.

    Example: TRL's defaults and ``--effective_batch_size 12`` give ``base`` 6 x 2 (the largest divisor of 12 that is
    not above TRL's 8), and 12 x 1, 6 x 2, 4 x 3, 3 x 4, 2 x 6 and 1 x 12 as the splits to choose from.
    """

    base: Knobs
    """TRL's defaults overlaid with everything the user pinned; its max_length is the length asked for."""
    pinned: frozenset[str] = frozenset()
    """Names of the knobs that the user gave. ``max_length: auto`` is a wish, not a pin."""
    effective_batch_size: int
    fit: Fit = "all"
    forbid: frozenset[str] = frozenset()
    context_length: int | None = None
    is_quantized: bool = False
    """The checkpoint is quantized already."""
    longest: int | None = None
    """Tokens of the longest row, when the dataset was read; of the longest prompt, in online methods."""
    shortest: int | None = None
    """Tokens of the shortest pair of a reward job: below it ``max_length`` would drop every pair."""
    rows_allowed: tuple[int, ...] | None = None
    """Micro-batches to choose from, largest first, where the trainer's own batches leave fewer than the divisors of
    the effective batch."""
    max_slowdown: float = MAX_SLOWDOWN
    """A plan that takes so many times as long as the best of the next level is not taken by itself."""
    method: str = "sft"
    model: str = "the model"
    """Name for messages."""

    def row_tokens(self, max_length: int | None) -> int:
        """The longest that a row of the batch can be at this ``max_length``: 80 of 1024 where no row is longer.

        A packed row is always filled to ``max_length``; a prompt is followed by a completion.
        """
        if self.base.completion_length:
            return (self.longest or UNKNOWN_ROW_TOKENS) + self.base.completion_length
        longest = None if self.base.packing else self.longest
        known = [tokens for tokens in (max_length, longest, self.context_length) if tokens is not None]
        return min(known, default=UNKNOWN_ROW_TOKENS)

    def micro_batch_tokens(self, knobs: Knobs) -> int:
        """Tokens of one micro-batch, to which activations are proportional."""
        return knobs.per_device_train_batch_size * self.row_tokens(knobs.max_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSplit:
    """One way to make the effective batch: rows at once, times how often before the optimizer steps."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int

    def of(self, knobs: Knobs) -> Knobs:
        """The same knobs with this split."""
        return replace(
            knobs,
            per_device_train_batch_size=self.per_device_train_batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
        )


def batch_splits(space: Space) -> tuple[BatchSplit, ...]:
    """The splits to choose from, largest micro-batch first; a single one as soon as either of the two is pinned."""
    fixed = bool(space.pinned & {ROWS, STEPS})
    free = space.rows_allowed or divisors(space.effective_batch_size)[::-1]
    rows = [space.base.per_device_train_batch_size] if fixed else free
    return tuple(
        BatchSplit(per_device_train_batch_size=each, gradient_accumulation_steps=space.effective_batch_size // each)
        for each in rows
    )


def make_space(
    defaults: Knobs,
    job: Job,
    facts: ModelFacts,
    *,
    longest: int | None,
    shortest: int | None = None,
    asked_length: int | None = None,
) -> Space:
    """The space of one job.

    Args:
        defaults: What the installed TRL would take for each knob.
        job: The user's words; an argument given is pinned.
        facts: Of the job's model.
        longest: Tokens of the longest row; None when the dataset was not read.
        shortest: Of the shortest.
        asked_length: What the data answer to a ``max_length`` of ``p99`` (``DataProfile.asked_length``); None for the
            longest row.

    Raises:
        UsageError: a number that is not a positive whole one; all of them in one message.
        BatchSplitError: the pinned sizes do not make up the effective batch.
        ContextLengthError: the pinned max_length, or prompt and completion together, are beyond the model's context.
    """
    given, context_length = _pinned_arguments(job), facts.context_length
    _check_numbers(given, job.effective_batch_size)
    split = _base_split(defaults, job.effective_batch_size, given)
    overlaid = split.of(replace(_applying(defaults, job), **given))
    if "max_length" in given:
        _check_context(given["max_length"], context_length)
    elif not job.is_online:
        wanted = longest if asked_length is None else asked_length
        overlaid = replace(overlaid, max_length=_auto_length(defaults.max_length, context_length, wanted))
    _check_completion(overlaid, longest, context_length)
    allowed = rows_allowed(job, overlaid)
    overlaid = _within(overlaid, allowed)
    return Space(
        base=overlaid,
        pinned=_pinned(job, given),
        effective_batch_size=overlaid.effective_batch_size,
        fit=job.fit,
        forbid=job.forbid,
        context_length=context_length,
        is_quantized=facts.is_quantized,
        longest=longest,
        shortest=shortest if job.method_facts.drops_long_rows else None,
        rows_allowed=allowed,
        max_slowdown=job.max_slowdown,
        method=job.method,
        model=job.model,
    )


def _pinned_arguments(job: Job) -> dict[str, Any]:
    knobs = {field.name for field in fields(Knobs)}
    return {name: value for name, value in without_wish(job.arguments).items() if name in knobs}


def _pinned(job: Job, given: dict[str, Any]) -> frozenset[str]:
    """vLLM's sleep mode refuses expandable segments (``vllm/device_allocator/cumem.py: CuMemAllocator``)."""
    implied = {"use_vllm": "expandable_segments"}
    return frozenset(given) | {knob for argument, knob in implied.items() if job.arguments.get(argument)}


def _applying(defaults: Knobs, job: Job) -> Knobs:
    """TRL's defaults without those that this job never uses.

    DPO's reference scores the data in batches of evaluation's size when that is done before training
    (trl/trainer/dpo_trainer.py: _precompute_ref_logps).
    """
    used = job.is_evaluated or job.arguments.get("precompute_ref_log_probs")
    return defaults if used else replace(defaults, per_device_eval_batch_size=None)


def _within(knobs: Knobs, allowed: tuple[int, ...] | None) -> Knobs:
    """The same batch in micro-batches that the trainer takes: the largest that are not above those asked for."""
    rows = knobs.per_device_train_batch_size
    if allowed is None or rows in allowed:
        return knobs
    smaller = max((each for each in allowed if each < rows), default=min(allowed))
    steps = knobs.effective_batch_size // smaller
    return BatchSplit(per_device_train_batch_size=smaller, gradient_accumulation_steps=steps).of(knobs)


_COUNTS = (
    *(ROWS, STEPS, EVALUATED_ROWS, "max_length", "max_completion_length", "response_length", "num_generations"),
    "local_rollout_forward_batch_size",
)


def _check_numbers(given: dict[str, Any], effective_batch_size: int | None) -> None:
    unlimited = {"max_length"} if given.get("max_length") is None else set()
    numbers = {name: given[name] for name in _COUNTS if name in given and name not in unlimited}
    if effective_batch_size is not None:
        numbers["effective_batch_size"] = effective_batch_size
    check_positive(numbers)


def _auto_length(default: int | None, context_length: int | None, wanted: int | None) -> int | None:
    """Says what the rows ask for, or TRL's default where no row was read; never beyond the model's context."""
    wanted = default if wanted is None else wanted
    known = [tokens for tokens in (wanted, context_length) if tokens is not None]
    return min(known, default=None)


def _check_context(max_length: int | None, context_length: int | None) -> None:
    if max_length is None or context_length is None or max_length <= context_length:
        return
    raise ContextLengthError(
        f"--max_length {max_length} is beyond the model's context of {context_length} tokens",
        hint=f"use --max_length {context_length} or less, or --max_length auto",
    )


def _check_completion(knobs: Knobs, prompt: int | None, context_length: int | None) -> None:
    """Nothing cuts a prompt, so prompt and completion must find room together."""
    together = (prompt or 0) + knobs.completion_length
    if not knobs.completion_length or context_length is None or together <= context_length:
        return
    name = "max_completion_length" if knobs.max_completion_length else "response_length"
    room = context_length - (prompt or 0)
    if room < 1:
        raise ContextLengthError(
            f"The longest prompt has {prompt} tokens, and the model's context is {context_length}.",
            hint="TRL truncates no prompt: drop the longest ones from the data, or take a model with a longer context.",
        )
    longest = f"the longest prompt ({prompt} tokens) and " if prompt else ""
    raise ContextLengthError(
        f"{longest}--{name} {knobs.completion_length} are beyond the model's context of {context_length} tokens",
        hint=f"use --{name} {room} or less",
    )


def _base_split(defaults: Knobs, effective: int | None, given: dict[str, Any]) -> BatchSplit:
    """The split that the user's words and TRL's defaults make before any tuning."""
    if effective is None:
        rows = given.get(ROWS, defaults.per_device_train_batch_size)
        steps = given.get(STEPS, defaults.gradient_accumulation_steps)
        return BatchSplit(per_device_train_batch_size=rows, gradient_accumulation_steps=steps)
    if ROWS in given and STEPS in given:
        _check_product(given[ROWS], given[STEPS], effective)
    for name in (ROWS, STEPS):
        if name in given:
            _check_divides(name, given[name], effective)
    if ROWS in given:
        rows = given[ROWS]
    elif STEPS in given:
        rows = effective // given[STEPS]
    else:  # TRL's micro-batch where it divides the effective batch, else the next smaller one that does
        rows = max(rows for rows in divisors(effective) if rows <= defaults.per_device_train_batch_size)
    return BatchSplit(per_device_train_batch_size=rows, gradient_accumulation_steps=effective // rows)


def _check_product(rows: int, steps: int, effective: int) -> None:
    if rows * steps == effective:
        return
    raise BatchSplitError(
        f"--{ROWS} {rows} times --{STEPS} {steps} is {rows * steps}, not the effective batch size {effective}",
        hint=f"use --effective_batch_size {rows * steps} with both flags, or --effective_batch_size {effective} alone",
    )


def _check_divides(name: str, value: int, effective: int) -> None:
    if effective % value == 0:
        return
    whole = " or ".join(f"--effective_batch_size {product}" for product in multiples(value, effective))
    raise BatchSplitError(
        f"--{name} {value} does not divide the effective batch size {effective}",
        hint=f"keep --{name} {value} and use {whole},\n"
        f"or keep --effective_batch_size {effective} and use --{name} {either(nearest(divisors(effective), value))}",
    )
