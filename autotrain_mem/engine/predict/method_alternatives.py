"""When a method does not fit: what the same training would need with those that get by with fewer models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autotrain_mem.errors import AutofitError, DoesNotFitError
from autotrain_mem.methods.table import METHODS
from autotrain_mem.planner.division import GROUP, ROWS, SMALLEST_GROUP, STEPS, divisors
from autotrain_mem.planner.levels import levels
from autotrain_mem.planner.points import least_demanding
from autotrain_mem.planner.space import Space, make_space
from autotrain_mem.spec import Estimate, Job, Knobs
from autotrain_mem.spec.model import ModelFacts
from autotrain_mem.units import format_bytes

LARGEST_GROUP = 8
"""GRPO's default ``num_generations``; RLOO's, 2, would leave the size of a rollout to chance in the comparison."""

_DECIDED = (ROWS, STEPS, "local_rollout_forward_batch_size")

Predict = Callable[[Job, Knobs], Estimate]


def with_alternatives(error: DoesNotFitError, job: Job, space: Space, predict: Predict) -> DoesNotFitError:
    """The error, whose hint also says what each lighter method would need at least: one rehearsal each."""
    if job.handed is not None:  # other trainers are called otherwise
        return error
    lines = [line for method in job.method_facts.lighter_methods if (line := _line(method, job, space, predict))]
    return DoesNotFitError(error.message, hint="\n".join([error.hint, *lines]))


def _line(method: str, job: Job, space: Space, predict: Predict) -> str:
    """``autofit rloo would need 9.10 GiB at least, which fits ...``; empty where it cannot be rehearsed."""
    other = _other_job(method, job, space)
    try:
        facts = ModelFacts(context_length=space.context_length, is_quantized=space.is_quantized)
        other_space = make_space(_other_defaults(space), other, facts, longest=space.longest)
        least = predict(other, least_demanding(other_space, levels(other_space)[-1]))
    except AutofitError:  # the error that is on its way matters more than one about a proposal
        return ""
    fits = "which fits" if least.fits else "which does not fit either"
    command = f"autofit {method} {_flags(other)} would need {format_bytes(least.required_bytes)} at least, {fits}"
    return f"{command}: {job.method_facts.lighter_methods[method]}"


def _other_job(method: str, job: Job, space: Space) -> Job:
    """The same rewards, completions and effective batch in the words of another method."""
    renamed = {
        job.method_facts.reward_model_argument: METHODS[method].reward_model_argument,
        "response_length": "max_completion_length",
    }
    kept = {renamed.get(name) or name: value for name, value in job.arguments.items() if name not in _DECIDED}
    effective = max(SMALLEST_GROUP, space.effective_batch_size)
    groups = [size for size in divisors(effective) if SMALLEST_GROUP <= size <= LARGEST_GROUP]
    told = {"max_completion_length": space.base.completion_length, GROUP: max(groups, default=effective)}
    return replace(job, method=method, arguments=kept | told, effective_batch_size=effective)


def _other_defaults(space: Space) -> Knobs:
    """PPO's defaults serve: what differs by method is told."""
    return replace(space.base, response_length=None, local_rollout_forward_batch_size=None)


def _flags(other: Job) -> str:
    named = ("reward_model_name_or_path", "max_completion_length", GROUP)
    flags = [f"--{name} {other.arguments[name]}" for name in named if name in other.arguments]
    return " ".join([*flags, f"--effective_batch_size {other.effective_batch_size}"])
