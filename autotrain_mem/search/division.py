"""Finds the micro-batches that divide an effective batch and keep groups and mini-batches whole (GRPO, RLOO, PPO)."""

from collections.abc import Mapping
from math import gcd, isqrt, lcm
from typing import Any

from autotrain_mem.methods.interface import method_of
from autotrain_mem.settings.knobs import EVALUATED_ROWS, ROWS, STEPS
from autotrain_mem.support.errors import BatchSplitError, UsageError
from autotrain_mem.types import Job, Knobs

GROUP = "num_generations"
EVALUATED_GROUP = "num_generations_eval"
GENERATION = "generation_batch_size"
GENERATION_STEPS = "steps_per_generation"
MINI_BATCHES = "num_mini_batches"

SMALLEST_GROUP = 2
"""The fewest completions of a prompt (``trl/trainer/grpo_config.py: __post_init__`` and ``rloo_config.py``)."""

WHITENED_AT_LEAST = 8
"""The fewest rows of a mini-batch if PPO whitens rewards (``trl/experimental/ppo/ppo_trainer.py: __init__``)."""

MOST_ROWS = 10**9
"""The largest number of rows, tokens or steps that is accepted."""

NAMED_AT_MOST = 6
"""The number of alternatives that an error lists."""


def divisors(number: int) -> list[int]:
    """Returns a number's divisors: ``divisors(6) == [1, 2, 3, 6]``."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def either(numbers: list[int]) -> str:
    """Formats alternatives: ``1, 2 or 5``."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def check_positive(numbers: Mapping[str, Any]) -> None:
    """Raises UsageError for all flags whose value is not an integer from 1 to :data:`MOST_ROWS`."""
    wrong = [f"--{name} {value}" for name, value in numbers.items() if value not in range(1, MOST_ROWS + 1)]
    if wrong:
        raise UsageError(f"Out of range: {', '.join(wrong)}.", hint=f"Write a whole number from 1 to {MOST_ROWS:,}.")


def share(knobs: Knobs) -> int:
    """Returns the rows of an optimizer step for each process, or for each group of processes that shares rows."""
    return knobs.effective_batch_size // knobs.data_parallel_size


def rows_allowed(job: Job, knobs: Knobs) -> tuple[int, ...] | None:
    """Returns the micro-batches that the trainer accepts, largest first; None for all divisors. Raises BatchSplitError
    if no micro-batch divides the batches, or the given one does not, and UsageError if the sizes of groups and
    generations contradict each other."""
    # TRL divides by these without a check.
    names = (GENERATION, GENERATION_STEPS, MINI_BATCHES, EVALUATED_GROUP)
    check_positive({name: value for name in names if (value := job.arguments.get(name)) is not None})
    pinned = [name for name in (ROWS, STEPS) if name in job.arguments]
    removed = " and --".join(pinned)
    rows, method = knobs.per_device_train_batch_size, method_of(job.method)
    if knobs.num_generations is not None:
        _check_evaluated_groups(job, knobs)
        allowed = _of_whole_groups(job, knobs, knobs.num_generations)
    elif (batches := method.mini_batches(job.arguments)) is not None:
        allowed = _of_whole_mini_batches(job, knobs, batches)
    elif (least := method.least_rows(job.arguments)) > 1:
        allowed = tuple(size for size in divisors(share(knobs))[::-1] if size >= least)
        if not allowed or (pinned and rows not in allowed):
            cure = f"use --effective_batch_size {least * knobs.processes} or more"
            if pinned:
                cure = f"use --{ROWS} {least} or more{f', or remove --{removed}' if allowed else ''}"
            raise BatchSplitError(
                f"{job.method} compares the rows of a micro-batch with each other, so it needs at least {least}",
                hint=cure,
            )
    else:
        return None
    if allowed is None or not pinned or rows in allowed:
        return allowed
    given = [name for name in (GENERATION, GENERATION_STEPS, MINI_BATCHES) if job.arguments.get(name) is not None]
    divided = " and ".join(f"--{name} {job.arguments[name]}" for name in given)
    raise BatchSplitError(
        f"micro-batches of {rows} do not work with {divided}: groups and mini-batches stay whole",
        hint=f"use --{ROWS} {either(nearest(list(allowed), rows))}, or remove --{removed}",
    )


def _of_whole_groups(job: Job, knobs: Knobs, group: int) -> tuple[int, ...] | None:
    """Returns the micro-batches whose generations hold whole groups; None for all. A generation is the effective batch
    unless its size or steps are given (``trl/trainer/grpo_config.py: __post_init__``, ``rloo_config.py``)."""
    size, steps = job.arguments.get(GENERATION), job.arguments.get(GENERATION_STEPS)
    if group < SMALLEST_GROUP:
        raise UsageError(
            f"--{GROUP} {group}: a completion is compared with the others of its prompt, so at least two are needed.",
            hint=f"Give --{GROUP} {SMALLEST_GROUP} or more.",
        )
    if size is not None and steps is not None:
        raise UsageError(
            f"--{GENERATION} and --{GENERATION_STEPS} exclude each other: one follows from the other.",
            hint=f"Remove --{GENERATION_STEPS}.",
        )
    every, processes = divisors(share(knobs))[::-1], knobs.processes
    if steps is not None:
        if not (allowed := tuple(rows for rows in every if rows * processes * steps % group == 0)):
            raise BatchSplitError(
                f"--{GROUP} {group} does not divide the completions of a generation with any micro-batch of an "
                f"effective batch of {knobs.effective_batch_size} (a generation is {steps} micro-batches): those of "
                "one prompt form a group, and groups stay whole",
                hint=f"use --effective_batch_size "
                f"{either(multiples(lcm(group, processes), knobs.effective_batch_size))}, "
                f"or remove --{GENERATION_STEPS}",
            )
        return allowed
    if size is not None:
        _check_groups(group, size, GENERATION, group)
        if size % processes:
            raise BatchSplitError(
                f"--{GENERATION} {size} is not a multiple of the {processes} processes that share it",
                hint=f"use --{GENERATION} {either(multiples(lcm(group, processes), size))}",
            )
        return tuple(rows for rows in every if size % (rows * processes) == 0)
    pinned = [value for name in (ROWS, STEPS) if isinstance(value := job.arguments.get(name), int)]
    _check_groups(group, knobs.effective_batch_size, "effective_batch_size", lcm(group, processes, *pinned))
    return None


def _check_groups(group: int, completions: int, flag: str, unit: int) -> None:
    """Raises BatchSplitError if groups do not divide the completions; suggests multiples of ``unit`` for ``flag``."""
    if completions % group == 0:
        return
    groups = nearest([size for size in divisors(completions) if size >= SMALLEST_GROUP], group)
    others = f",\nor keep it and use --{GROUP} {either(groups)}" if groups else ""
    raise BatchSplitError(
        f"--{GROUP} {group} does not divide {completions} completions: those of one prompt form a group, and groups "
        "stay whole",
        hint=f"use --{flag} {either(multiples(unit, completions))}{others}",
    )


def _check_evaluated_groups(job: Job, knobs: Knobs) -> None:
    """Raises BatchSplitError if groups do not divide an evaluation batch, which all processes make up together."""
    group, rows = job.arguments.get(EVALUATED_GROUP) or knobs.num_generations or 1, knobs.per_device_eval_batch_size
    together = 0 if rows is None else rows * knobs.processes
    if not job.is_evaluated or rows is None or together % group == 0:
        return
    unit = group // gcd(group, knobs.processes)
    raise BatchSplitError(
        f"groups of {group} completions do not divide the {together} of an evaluation batch, and groups stay whole",
        hint=f"use --{EVALUATED_ROWS} {either(multiples(unit, rows))}, or --{EVALUATED_GROUP} "
        f"{either(nearest(divisors(together), group))}",
    )


def multiples(unit: int, near: int) -> list[int]:
    """Returns the multiples below and above a number: ``multiples(8, 12) == [8, 16]``."""
    below = near // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple]


def nearest(numbers: list[int], to: int) -> list[int]:
    """Returns the nearest few numbers, in ascending order."""
    return sorted(sorted(numbers, key=lambda number: abs(number - to))[:NAMED_AT_MOST])


def _of_whole_mini_batches(job: Job, knobs: Knobs, batches: int) -> tuple[int, ...] | None:
    """Divides each process's share into whole mini-batches, and these into whole micro-batches.
    ``trl/experimental/ppo/ppo_trainer.py: __init__`` asserts the first; the second is needed to accumulate."""
    effective, rows, processes = knobs.effective_batch_size, share(knobs), knobs.processes
    if rows % batches:
        each = f" when split over {processes} processes" if processes > 1 else ""
        raise BatchSplitError(
            f"--{MINI_BATCHES} {batches} does not divide the effective batch size {effective}{each}",
            hint=f"use --effective_batch_size {either(multiples(batches * processes, effective))}, or --{MINI_BATCHES} "
            f"{either(nearest(divisors(rows), batches))}",
        )
    if job.arguments.get("whiten_rewards") and rows // batches < WHITENED_AT_LEAST:
        fewer = [size for size in divisors(rows) if rows // size >= WHITENED_AT_LEAST]
        instead = f", or --{MINI_BATCHES} {either(nearest(fewer, batches))}" if fewer else ""
        raise BatchSplitError(
            f"--whiten_rewards needs mini-batches of at least {WHITENED_AT_LEAST} rows, and {rows} rows in {batches} "
            f"mini-batches are {rows // batches} each",
            hint=f"use --effective_batch_size {WHITENED_AT_LEAST * batches * processes} or more{instead}",
        )
    return tuple(divisors(rows // batches)[::-1]) if batches > 1 else None
