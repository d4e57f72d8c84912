"""Reward functions are found, tried once and named, before anything is planned."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autotrain_mem.methods import reward_functions
from autotrain_mem.support.errors import RewardFunctionError, UsageError

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
        (tmp_path / f"{name}.py").write_text(f"seen = []\n{definition}:\n    seen.append(given); {body}\n")
        return f"{name}.judge"

    return written


@pytest.mark.parametrize("definition", ["def judge(**given)", "async def judge(**given)"])
@pytest.mark.parametrize(("rows", "kind"), [(PLAIN, str), (CHAT, list)], ids=["texts", "conversations"])
def test_a_function_sees_what_trl_gives_it_and_a_coroutine_is_awaited(
    rows: list[dict[str, Any]], kind: type, definition: str, write: Write
) -> None:
    path = write("return [0.5, None]", definition)
    reward_functions.try_once([path], rows)
    (given,) = importlib.import_module(path.rpartition(".")[0]).seen
    own = {"completion_ids", "completions", "log_extra", "log_metric", "prompts", "trainer_state"}
    assert given.keys() == own | {"answer"}
    assert given["answer"] == ["4", "5"]
    assert [type(each) for each in given["completions"]] == [kind, kind], "of the prompts' kind"


def test_a_function_that_trl_could_not_use_is_named_and_trls_own_are_tried_too(write: Write) -> None:
    path = write("return [[1.0], 1.0, ['a', 1.0]][len(seen) - 1]")
    for said in ("returned 1 rewards for 2 completions", "returned float, not a list", "'a', which is not a number"):
        with pytest.raises(RewardFunctionError, match=f"{path}.*{said}"):
            reward_functions.try_once([path], PLAIN)
    reward_functions.try_once(["think_format_reward"], CHAT)
    with pytest.raises(RewardFunctionError, match="think_format_reward"):
        reward_functions.try_once(["think_format_reward"], PLAIN)


def test_a_package_that_trls_function_lacks_is_passed_over_by_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reward_functions.built_in_rewards().keys() == {*reward_functions.BUILT_IN}
    asked: list[None] = []

    def needs_a_package(**_: Any) -> list[float]:
        asked.append(None)
        raise ImportError("math_verify is not installed")

    monkeypatch.setattr(reward_functions, "built_in_rewards", lambda: {"accuracy_reward": needs_a_package})
    reward_functions.try_once(["accuracy_reward"], CHAT)
    assert asked


def test_a_function_that_runs_out_of_memory_is_not_blamed_and_an_unknown_one_refused(write: Write) -> None:
    (function,) = reward_functions.reward_functions([write("import torch; raise torch.OutOfMemoryError('full')")])
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        function()
    with pytest.raises(UsageError) as caught:
        reward_functions.reward_functions(["think_fromat_reward"])
    assert "think_format_reward" in caught.value.hint.splitlines()[0]
