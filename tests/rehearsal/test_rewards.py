"""Reward functions are found, tried once and named, before anything is planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotrain_mem.errors import RewardFunctionError, UsageError
from autotrain_mem.rehearsal import rewards

PLAIN = [{"prompt": "How many?", "answer": "4"}, {"prompt": "How much?", "answer": "5"}]
CHAT = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in PLAIN]

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the body of a function into a module of the working folder; returns the function's dotted path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(body: str, definition: str = "def judge(**given)") -> str:
        name = f"rewards_of_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(f"{definition}:\n    {body}\n")
        return f"{name}.judge"

    return written


def test_a_function_sees_what_trl_gives_it(write: Write) -> None:
    path = write(
        "assert sorted(given) == ['answer', 'completion_ids', 'completions', 'log_extra', 'log_metric', 'prompts', "
        "'trainer_state'] and given['answer'] == ['4', '5']; return [0.5, None]"
    )
    rewards.try_once([path], PLAIN)


@pytest.mark.parametrize(("rows", "kind"), [(PLAIN, "str"), (CHAT, "list")])
def test_completions_are_of_the_prompts_kind(rows: list[dict[str, Any]], kind: str, write: Write) -> None:
    rewards.try_once(
        [write(f"return [float(isinstance(each, {kind}) or 'no') for each in given['completions']]")], rows
    )


def test_a_coroutine_is_awaited(write: Write) -> None:
    rewards.try_once([write("return [1.0, 2.0]", "async def judge(**given)")], PLAIN)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return given['nothing']", "raised KeyError"),
        ("return 1.0", "returned float, not a list"),
        ("return [1.0]", "returned 1 rewards for 2 completions"),
        ("return ['a', 1.0]", "'a', which is no number"),
    ],
)
def test_a_function_that_trl_could_not_use_is_named(body: str, said: str, write: Write) -> None:
    path = write(body)
    with pytest.raises(RewardFunctionError, match=said) as caught:
        rewards.try_once([path], PLAIN)
    assert path in caught.value.message


def test_trls_own_functions_are_tried_too() -> None:
    rewards.try_once(["think_format_reward"], CHAT)
    with pytest.raises(RewardFunctionError, match="think_format_reward"):
        rewards.try_once(["think_format_reward"], PLAIN)


def test_a_package_that_trls_function_needs_is_not_asked_for_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_a_package(**_: Any) -> list[float]:
        raise ImportError("math_verify is not installed")

    monkeypatch.setattr(rewards, "built_in_rewards", lambda: {"accuracy_reward": needs_a_package})
    rewards.try_once(["accuracy_reward"], CHAT)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        rewards.reward_functions(["think_fromat_reward"])
    assert "think_format_reward" in caught.value.hint.splitlines()[0]
