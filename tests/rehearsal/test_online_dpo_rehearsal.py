"""Online DPO beside a reward model, and with prompts of which the loss sees the end alone: as in the real run."""

import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from real_run import LENGTH, Case, assert_alike, case, peaks, rehearsed

from autotrain_mem.types import Owner, Phase

pytestmark = [pytest.mark.slow, pytest.mark.newest]
Folder = Callable[[str], pathlib.Path]


def judged(folder: pathlib.Path, arguments: dict[str, Any], **knobs: Any) -> Case:
    one = case("online_dpo", folder, **knobs)
    return replace(one, job=replace(one.job, arguments={**one.job.arguments, **arguments}))


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_a_reward_model_scores_beside_what_the_policy_keeps_for_its_backward_pass(
    adapted: bool, model_folder: Folder, tmp_path: pathlib.Path
) -> None:
    folder = model_folder("qwen2")
    arguments = {"reward_model_path": str(folder), "missing_eos_penalty": 1.0}
    fake, _, made = assert_alike(judged(folder, arguments, use_peft=adapted, gradient_checkpointing=False), tmp_path)
    assert (made.ref_model is None) == adapted
    weights = [block.module.partition(".")[0] for _, _, block in fake.walk() if block.owner is Owner.WEIGHTS]
    assert ("reward_model" in weights, "ref_model" in weights) == (True, not adapted)
    largest = peaks(fake)
    assert max(largest, key=lambda phase: largest[phase]) == Phase.SCORE


def test_what_is_longer_than_max_length_is_sampled_whole_and_cut_before_the_loss(
    model_folder: Folder, tmp_path: pathlib.Path
) -> None:
    one = judged(model_folder("qwen2"), {}, max_length=LENGTH // 2)
    fake, _, _ = assert_alike(one, tmp_path)
    whole = rehearsed(judged(model_folder("qwen2"), {}))
    assert peaks(fake)[Phase.GENERATE] == peaks(whole)[Phase.GENERATE]
    assert peaks(fake)[Phase.BACKWARD] < peaks(whole)[Phase.BACKWARD]
