"""Finds reward functions by name, and tries them before planning."""

import ast
import contextlib
import difflib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autotrain_mem.support.errors import RewardFunctionError, UsageError, described

RewardFunction = Callable[..., Any]

_SIGNATURE = (
    "TRL calls it with prompts, completions, completion_ids and the dataset's other columns, each a list with one item "
    "per completion, and expects a list with one number (or None) per completion."
)


BUILT_IN = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")
"""TRL's own reward functions, by their names for ``trl grpo`` (trl/scripts/grpo.py: main)."""
_HINT = f"Give --reward_funcs one of {', '.join(BUILT_IN)}, or module.function with the module in this folder."


def built_in_rewards() -> dict[str, RewardFunction]:
    """Returns TRL's own reward functions, as ``trl grpo`` makes them."""
    from trl import rewards

    limits = {"max_completion_len": 1280, "soft_punish_cache": 256}
    return {
        **{name: getattr(rewards, name) for name in BUILT_IN[:-1]},
        BUILT_IN[-1]: rewards.get_soft_overlong_punishment(**limits),
    }


def undefined_rewards(names: Iterable[str]) -> Iterator[UsageError]:
    """Yields an error for each name that TRL does not have, whose module does not exist, or which the module's file in
    the working folder does not define. Imports none of them."""
    for name in (each for each in names if each not in BUILT_IN):
        module, _, function = name.rpartition(".")
        package, path = module.partition(".")[0], Path(*module.split("."))
        files = [each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()] if module else []
        is_here, wrong, known = bool(files) or (bool(package) and Path(package).is_dir()), "", {*BUILT_IN}
        if not module:
            wrong = f": TRL knows no reward function {name!r}"
        elif not is_here and not (package.isidentifier() and find_spec(package)):
            wrong = f" {name}: there is no module {package!r}"
        for file in files:
            with contextlib.suppress(SyntaxError, ValueError):  # its import tells what is wrong
                nodes = [*ast.walk(ast.parse(file.read_bytes()))]
                words = {str(getattr(node, "id", getattr(node, "name", ""))) for node in nodes}
                words |= {node.asname for node in nodes if isinstance(node, ast.alias) and node.asname}
                if not {function, "*", "__getattr__", "globals", "setattr", "exec"} & words:
                    wrong, known = f": {module} has no {function!r}", {f"{module}.{word}" for word in words if word}
        if wrong:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"Did you mean {near[0]}?\n" if near else ""
            yield UsageError(f"--reward_funcs{wrong}.", hint=f"{meant}{_HINT}")


def reward_functions(names: Sequence[str]) -> list[RewardFunction]:
    """Returns the functions of these names: TRL's own, or ``module.function``, importable from the working folder.
    Raises UsageError with the reason if a function is not found."""
    known = built_in_rewards()
    return [_naming_itself(name, known[name]) if name in known else _imported(name) for name in names]


def _imported(name: str) -> RewardFunction:
    for error in undefined_rewards([name]):
        raise error
    module_name, _, function_name = name.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's module, which may raise anything
        raise UsageError(
            f"--reward_funcs {name}: {module_name} cannot be imported: {described(error)}",
            hint=f"Fix {module_name}, or install what it imports.",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"--reward_funcs {name} is not a function.", hint=_HINT)
    return _naming_itself(name, function)


@contextlib.contextmanager
def _blaming(name: str) -> Iterator[None]:
    """Within the block, adds the reward function's name to every error except out of memory."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise RewardFunctionError(f"The reward function {name} raised {described(error)}", hint=_SIGNATURE) from error


def _naming_itself(name: str, function: RewardFunction) -> RewardFunction:
    """Wraps a function so that its errors name it."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with _blaming(name):
                return await function(*args, **kwargs)

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _blaming(name):
            return function(*args, **kwargs)

    return called


def try_once(names: Sequence[str], split: Any) -> None:
    """Calls every function as TRL does, on two rows of the dataset with a placeholder completion each.

    A package that one of TRL's own functions lacks is ignored here; ``run.early`` reports it before a run.
    Raises RewardFunctionError if a function raises, or does not return one number per completion.
    """
    rows = [split[index] for index in range(min(2, len(split)))]
    known = built_in_rewards() if names else {}
    for name, function in zip(names, reward_functions(names), strict=True):
        try:
            rewards = _call(function, rows)
        except RewardFunctionError as error:
            if name in known and isinstance(error.__cause__, ImportError):
                continue
            raise
        try:
            values = list(rewards)
        except TypeError:
            raise RewardFunctionError(
                f"The reward function {name} returned {type(rewards).__name__}, not a list.", hint=_SIGNATURE
            ) from None
        if len(values) != len(rows):
            raise RewardFunctionError(
                f"The reward function {name} returned {len(values)} rewards for {len(rows)} completions.",
                hint=_SIGNATURE,
            )
        for value in values:
            number = None
            with contextlib.suppress(TypeError, ValueError):
                number = float(0 if value is None else value)
            if number is None or isinstance(value, str):
                raise RewardFunctionError(
                    f"The reward function {name} returned {value!r}, which is not a number.", hint=_SIGNATURE
                )


def _call(function: RewardFunction, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Calls a reward function as ``trl/trainer/grpo_trainer.py: _calculate_rewards`` does."""
    import asyncio

    from transformers import TrainerState

    prompts = [row["prompt"] for row in rows]
    answer = "An answer."
    conversational = [[{"role": "assistant", "content": answer}] for _ in rows]
    kept = [name for name in rows[0] if name not in ("prompt", "completion", "completion_ids")]
    arguments = {
        "prompts": prompts,
        "completions": [answer] * len(rows) if isinstance(prompts[0], str) else conversational,
        "completion_ids": [[0]] * len(rows),
        **{name: [row[name] for row in rows] for name in kept},
        "trainer_state": TrainerState(),
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }
    rewards = function(**arguments)
    return asyncio.run(rewards) if inspect.iscoroutine(rewards) else rewards


def rehearsed_reward(prompts: Sequence[Any], **_: Any) -> list[float]:
    """Replaces a reward function in a rehearsal. The rewards of successive completions differ."""
    return [float(index % 3) for index, _ in enumerate(prompts)]
