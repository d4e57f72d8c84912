"""Whichever way GKD's steps go, a rehearsal of them is the real training, to the byte.

``tests/rehearsal/test_parity.py`` has both ways of TRL's default, each in its turn.
"""

import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from real_run import assert_alike, case, peaks, rehearsed

from autotrain_mem.types import Phase

pytestmark = pytest.mark.newest

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "student": ({"lmbda": 1.0}, {}),
    "student_without_cache": ({"lmbda": 1.0}, {"gradient_checkpointing": True, "use_peft": True}),
    "teacher": ({"lmbda": 0.0, "seq_kd": True}, {"use_peft": True}),
    "data": ({"lmbda": 0.0, "beta": 1.0, "eval_strategy": "steps"}, {}),
    "one_micro_step": ({}, {"gradient_accumulation_steps": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_way_allocates_what_was_rehearsed(
    name: str, model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    arguments, knobs = CASES[name]
    one = case("gkd", model_folder("qwen2"), arguments, **{"gradient_checkpointing": False, **knobs})
    fake, *_ = assert_alike(one, tmp_path)
    generates = name != "data"
    assert (Phase.GENERATE in peaks(fake)) == generates
    assert Phase.FORWARD in peaks(fake)


def test_an_answer_behind_a_long_prompt_takes_more_than_the_row_and_one_behind_a_short_prompt_does_not(
    model_folder: Callable[[str], pathlib.Path],
) -> None:
    """The row has 40 tokens; 12 behind a prompt of 39 are 51, and behind one of 10 they are 22."""
    model = model_folder("qwen2")

    def of_tokens(prompt: int | None, **arguments: Any) -> int:
        one = case("gkd", model, arguments, gradient_checkpointing=False, max_new_tokens=12)
        largest = peaks(rehearsed(replace(one, job=replace(one.job, prompt_length=prompt))))
        return largest[Phase.FORWARD] - largest[Phase.OPTIMIZER_STEP]

    data = of_tokens(None, lmbda=0.0)
    assert of_tokens(None) == pytest.approx(data * 51 / 40, rel=0.02)
    assert of_tokens(10) == pytest.approx(data, rel=0.02)
    assert of_tokens(10, lmbda=1.0) == pytest.approx(data * 22 / 40, rel=0.02)
