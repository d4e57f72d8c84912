"""Says which other model a job cannot do without, and has not: without TRL. Pure: it runs in any process."""

from __future__ import annotations

from collections.abc import Callable

from autotrain_mem.support.errors import UsageError
from autotrain_mem.types.method_facts import MethodFacts


def missing(facts: MethodFacts, given: Callable[[str], object], *, to_train: bool) -> UsageError | None:
    """Make the error of a student without a teacher, or of answers of which nothing says how good they are.

    Args:
        given: Finds what an argument of TRL's is; None where it is not given.
        to_train: The answers are to be learned from.
    """
    if facts.teacher_argument and not given(facts.teacher_argument):
        return missing_teacher()
    judge = facts.reward_model_argument
    if facts.has_value_model:
        return missing_reward_model() if judge and not given(judge) else None
    if to_train and judge and not (given(judge) or given("reward_funcs")):
        return missing_reward(judge)
    return None


def missing_teacher() -> UsageError:
    """Make the error of a job without a teacher."""
    return UsageError(
        "No teacher is given: nothing says what the student is to learn.",
        hint="Give --teacher_model_name_or_path MODEL, a larger model with the student's vocabulary.",
    )


def missing_reward_model() -> UsageError:
    """Make the error of PPO without a reward model, which it cannot be planned without either."""
    return UsageError(
        "PPO needs a reward model: it gives the scores, and the value model starts from it.",
        hint="Give --reward_model_path MODEL, such as `autofit reward` makes; it reads the policy's tokens.",
    )


def missing_reward(argument: str) -> UsageError:
    """Make the error of a training without a reward.

    Args:
        argument: By which a reward model is given.
    """
    return UsageError(
        "No reward is given: nothing says which completions are good.",
        hint="Give --reward_funcs module.function (or one of TRL's own, such as think_format_reward), or "
        f"--{argument} MODEL.",
    )
