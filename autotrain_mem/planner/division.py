"""Which micro-batches divide a job's batches: its effective batch, and those that GRPO, RLOO and PPO add to it."""

from __future__ import annotations

from autotrain_mem.errors import BatchSplitError
from autotrain_mem.spec import Job, Knobs

GROUP = "num_generations"
MINI_BATCHES = "num_mini_batches"

NAMED_AT_MOST = 6
"""How many alternatives an error lists: more than a user reads at a glance helps nobody."""


def divisors(number: int) -> list[int]:
    """``divisors(6) == [1, 2, 3, 6]``."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def either(numbers: list[int]) -> str:
    """``1, 2 or 5``."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def rows_allowed(job: Job, knobs: Knobs) -> tuple[int, ...] | None:
    """Rows of a micro-batch that the trainer would take, largest first; None where the effective batch alone decides.

    Raises:
        BatchSplitError: none would do, or not those that were given.
    """
    if knobs.num_generations is not None:
        return _of_whole_groups(job, knobs, knobs.num_generations)
    if job.method == "ppo":
        return _of_whole_mini_batches(job, knobs)
    return None


def _of_whole_groups(job: Job, knobs: Knobs, group: int) -> tuple[int, ...] | None:
    """A generation holds whole groups; it is the effective batch unless its size or its steps are given.

    ``trl/trainer/grpo_config.py: __post_init__`` and ``rloo_config.py``.
    """
    effective, rows = knobs.effective_batch_size, knobs.per_device_train_batch_size
    size, steps = job.arguments.get("generation_batch_size"), job.arguments.get("steps_per_generation")
    if steps is not None:
        _check_groups(group, rows * steps, "generation_batch_size")
        return tuple(each for each in divisors(effective)[::-1] if each * steps % group == 0)
    if size is not None:
        _check_groups(group, size, "generation_batch_size")
        return tuple(each for each in divisors(effective)[::-1] if size % each == 0)
    _check_groups(group, effective, "effective_batch_size")
    return None


def _check_groups(group: int, generation: int, flag: str) -> None:
    if generation % group == 0:
        return
    below = generation // group * group
    sizes = either([size for size in (below, below + group) if size])
    smaller = [divisor for divisor in divisors(generation) if divisor > 1]
    groups = sorted(sorted(smaller, key=lambda divisor: abs(divisor - group))[:NAMED_AT_MOST])
    other = f",\nor keep it and use --{GROUP} {either(groups)}" if groups else ""
    raise BatchSplitError(
        f"--{GROUP} {group} does not divide {generation} completions: those of one prompt form a group, and groups "
        "stay whole",
        hint=f"use --{flag} {sizes}{other}",
    )


def _of_whole_mini_batches(job: Job, knobs: Knobs) -> tuple[int, ...] | None:
    """The effective batch makes whole mini-batches, and these whole micro-batches.

    ``trl/experimental/ppo/ppo_trainer.py: __init__`` asks the first; with the second not true, its loop would run more
    micro-steps than are accumulated.
    """
    effective, batches = knobs.effective_batch_size, job.arguments.get(MINI_BATCHES) or 1
    if effective % batches:
        above = (effective // batches + 1) * batches
        numbers = either(divisors(effective)[:NAMED_AT_MOST])
        raise BatchSplitError(
            f"--{MINI_BATCHES} {batches} does not divide the effective batch size {effective}",
            hint=f"use --effective_batch_size {above}, or --{MINI_BATCHES} {numbers}",
        )
    return tuple(divisors(effective // batches)[::-1]) if batches > 1 else None
