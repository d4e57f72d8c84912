"""Whichever way GKD's steps go, and whatever judges online DPO, a rehearsal is the real training, to the byte.

``tests/rehearsal/test_parity.py`` has both ways of TRL's default, each in its turn.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from real_run import LENGTH, Case, Folder, assert_alike, case, peaks, rehearsed

from autotrain_mem.types import Owner, Phase

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "student": ({"lmbda": 1.0}, {}),
    "teacher": ({"lmbda": 0.0, "seq_kd": True}, {"use_peft": True}),
    "data": ({"lmbda": 0.0, "beta": 1.0, "eval_strategy": "steps"}, {}),
    "one_micro_step": ({}, {"gradient_accumulation_steps": 1}),
}


@pytest.mark.parametrize("name", [pytest.param("student", marks=pytest.mark.newest), *list(CASES)[1:]])
def test_every_way_allocates_what_was_rehearsed(name: str, model_folder: Folder, tmp_path: Path) -> None:
    arguments, knobs = CASES[name]
    one = case("gkd", model_folder("qwen2"), arguments, **{"gradient_checkpointing": False, **knobs})
    fake, *_ = assert_alike(one, tmp_path)
    generates = name != "data"
    assert (Phase.GENERATE in peaks(fake)) == generates
    assert Phase.FORWARD in peaks(fake)


def test_an_answer_behind_a_long_prompt_takes_more_than_the_row_and_one_behind_a_short_prompt_does_not(
    model_folder: Folder,
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


def judged(folder: Path, arguments: dict[str, Any], **knobs: Any) -> Case:
    one = case("online_dpo", folder, **knobs)
    return replace(one, job=replace(one.job, arguments={**one.job.arguments, **arguments}))


@pytest.mark.slow
@pytest.mark.newest
def test_a_reward_model_scores_beside_what_the_policy_keeps_for_its_backward_pass(
    model_folder: Folder, tmp_path: Path
) -> None:
    folder = model_folder("qwen2")
    arguments = {"reward_model_path": str(folder), "missing_eos_penalty": 1.0}
    fake, _, made = assert_alike(judged(folder, arguments, gradient_checkpointing=False), tmp_path)
    assert made.ref_model is not None
    weights = [block.module.partition(".")[0] for _, _, block in fake.walk() if block.owner is Owner.WEIGHTS]
    assert {"reward_model", "ref_model"} <= {*weights}
    largest = peaks(fake)
    assert max(largest, key=lambda phase: largest[phase]) == Phase.SCORE


@pytest.mark.slow
def test_what_is_longer_than_max_length_is_sampled_whole_and_cut_before_the_loss(
    model_folder: Folder, tmp_path: Path
) -> None:
    one = judged(model_folder("qwen2"), {}, max_length=LENGTH // 2)
    fake, _, _ = assert_alike(one, tmp_path)
    whole = rehearsed(judged(model_folder("qwen2"), {}))
    assert peaks(fake)[Phase.GENERATE] == peaks(whole)[Phase.GENERATE]
    assert peaks(fake)[Phase.BACKWARD] < peaks(whole)[Phase.BACKWARD]
