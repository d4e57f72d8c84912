"""PPO that does not fit: the error says what RLOO and GRPO would need, from one rehearsal each."""

import re
from dataclasses import replace
from typing import Any

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem import api
from autotrain_mem.support.errors import DoesNotFitError
from autotrain_mem.support.units import GIB
from autotrain_mem.types import Job, Knobs
from tests.fake_worker import FakeWorker, rehearsals, toy

PPO = replace(TRL_DEFAULTS, max_length=None, response_length=53, local_rollout_forward_batch_size=64)
CARD = toy(8, "toy8", origin="named")
NEEDED_GIB = {"ppo": 40, "rloo": 6, "grpo": 9}


def fake_worker(**more: Any) -> FakeWorker:
    """Each method needs what the table says, whatever the knobs."""
    return FakeWorker(lambda job, knobs: [NEEDED_GIB[job.method] * GIB, 0], **more)


def failing_plan(worker: FakeWorker, job: Job) -> DoesNotFitError:
    with pytest.raises(DoesNotFitError) as raised:
        api.plan(rehearsals(worker, job, CARD, PPO))
    return raised.value


def ppo_job(effective: int | None = None, **words: Any) -> Job:
    words = {"reward_model_path": "org/judge"} | words
    return Job(
        method="ppo", model="m", dataset=None, arguments=words, prompt_length=100, effective_batch_size=effective
    )


def test_ppo_that_does_not_fit_is_answered_with_what_rloo_and_grpo_need() -> None:
    worker = fake_worker()
    hint = failing_plan(worker, ppo_job()).hint.splitlines()
    methods = [each.job.method for each in worker.asked]
    assert (methods[-2:], {*methods[:-2]}) == (["rloo", "grpo"], {"ppo"})
    flags = "--reward_model_name_or_path org/judge --max_completion_length 53 --num_generations 8"
    assert hint == [
        "nothing that can be changed makes it fit here",
        "these settings would fit l40s (44.4 GiB) or rtx-pro-5000-blackwell (47.2 GiB)",
        f"autofit rloo {flags} --effective_batch_size 8 would need 6.00 GiB at least, which fits: no value model",
        f"autofit grpo {flags} --effective_batch_size 8 would need 9.00 GiB at least, which does not fit either: "
        "neither a value model nor, at its default beta, a reference model",
    ]


@pytest.mark.parametrize(
    ("gib", "words", "more"),
    [
        (12, {}, "2 of these (--gpus 2), 6.00 GiB each"),
        (40, {}, "8 of these (--gpus 8), 5.00 GiB each"),
        (90, {}, ""),  # 11.3 each
        (12, {"optim": "adamw_8bit"}, ""),  # whose kernels know no shards
        (12, {"per_device_train_batch_size": 1}, ""),  # one row is for one process
    ],
)
def test_more_of_the_card_are_named_where_shards_fit_them_as_rehearsed(
    gib: int, words: dict[str, Any], more: str
) -> None:
    def sizes(job: Job, knobs: Knobs) -> list[int]:
        return [gib * GIB // knobs.shards, 0]

    arguments = {"max_length": 64, "use_peft": False, "dtype": "float32", "optim": "adamw_torch"} | words
    job = Job(method="sft", model="m", dataset=None, arguments=arguments, forbid=frozenset({"optimizer_offload"}))
    worker = FakeWorker(sizes)
    hint = failing_plan(worker, job).hint
    assert (more in hint, " of these" in hint) == (True, bool(more))
    assert {each.knobs.processes for each in worker.asked} == ({1, int(more[0])} if more else {1})
    assert {each.knobs.effective_batch_size for each in worker.asked} == {words.get("per_device_train_batch_size", 8)}


def test_a_plan_does_not_wait_for_a_rehearsal_of_more_cards() -> None:
    """Weights of 12 GiB, and a fourth of that in 4 bits: all levels but the last need more than the card."""

    def sizes(job: Job, knobs: Knobs) -> list[int]:
        return [(4 if knobs.load_in_4bit else 12 if knobs.dtype == "float32" else 10) * GIB // knobs.shards, 0]

    worker = FakeWorker(sizes)
    job = Job(method="sft", model="m", dataset=None, arguments={"max_length": 64})
    plan = api.plan(rehearsals(worker, job, CARD, TRL_DEFAULTS))
    more = [way for each in plan.alternatives for way in each.would_fit if "of these" in way]
    assert {*more} == {f"2 of these (--gpus 2), about {size}.00 GiB each" for size in (5, 6)}
    assert {each.knobs.processes for each in worker.asked} == {1}


def test_an_alternative_keeps_prompts_completions_and_the_batch_and_asks_for_least() -> None:
    worker = fake_worker()
    failing_plan(worker, ppo_job(response_length=77, gradient_accumulation_steps=3, learning_rate=1e-6))
    job, knobs, length, _ = worker.asked[-1]
    assert length == 100
    assert (knobs.max_completion_length, knobs.response_length) == (77, None)
    assert (knobs.per_device_train_batch_size, knobs.effective_batch_size) == (1, 24)
    assert knobs.load_in_4bit
    assert job.arguments["learning_rate"] == 1e-6
    assert "reward_model_path" not in job.arguments
    failing_plan(worker, ppo_job(use_peft=False, dtype="float32"))
    knobs = worker.asked[-1].knobs
    assert (knobs.use_peft, knobs.dtype) == (False, "float32"), "what is pinned stays"


@pytest.mark.parametrize(("effective", "group"), [(1, 2), (6, 6), (11, 11), (12, 6)])
def test_groups_of_an_alternative_divide_its_batch(effective: int, group: int) -> None:
    worker = fake_worker()
    hint = failing_plan(worker, ppo_job(effective)).hint
    sizes = re.findall(r"--num_generations (\d+) --effective_batch_size (\d+)", hint)
    assert sizes == [(str(group), str(max(2, effective)))] * 2


def test_an_alternative_that_cannot_be_rehearsed_is_left_out_and_grpo_has_none() -> None:
    hint = failing_plan(fake_worker(failing=frozenset({"rloo"})), ppo_job()).hint
    assert ("autofit rloo" in hint, "autofit grpo" in hint) == (False, True)
    worker, card = fake_worker(), toy(2)
    defaults = replace(PPO, response_length=None, max_completion_length=53, num_generations=8)
    with pytest.raises(DoesNotFitError):
        api.plan(rehearsals(worker, replace(ppo_job(64), method="grpo"), card, defaults))
    assert {each.job.method for each in worker.asked} == {"grpo"}
