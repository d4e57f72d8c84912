"""Each method refuses what its trainer would end with, or take for something else, and what is not rehearsed."""

import pathlib
from typing import Any

import pytest

from autotrain_mem.data.token_lengths import counting_arguments
from autotrain_mem.methods.interface import method_of
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Job
from autotrain_mem.types.methods_table import METHODS

pytestmark = pytest.mark.newest

PAIRS = (
    ({"max_length": None}, "--max_length none for 512 tokens"),
    ({"generate_during_eval": True}, "its samples are not rehearsed"),
    ({"max_completion_length": 8}, "are for encoder-decoder models"),
    ({"is_encoder_decoder": True}, "are for encoder-decoder models"),
)
REFUSED: dict[str, tuple[tuple[dict[str, Any], str], ...]] = {
    "orpo": PAIRS,
    "cpo": PAIRS,
    "gkd": (
        *(({name: True}, f"--{name} is not for GKD") for name in ("packing", "eval_packing", "padding_free")),
        ({"assistant_only_loss": True}, "--assistant_only_loss is not for GKD"),
        ({"max_length": None}, "--max_length none for at most 1,024 tokens"),
        ({"teacher_model_init_kwargs": {"device_map": "auto"}}, "not know the teacher's place"),
        ({"chat_template_path": "org/model"}, "is not a file"),
    ),
    "distillation": (({"teacher_model_init_kwargs": {"device_map": "auto"}}, "not know the teacher's place"),),
    "online_dpo": (
        ({"eval_strategy": "steps", "eval_steps": 1}, "cannot be evaluated"),
        ({"beta": [0.1, 0.2]}, "--beta with 2 values"),
        ({"use_vllm": True}, "--use_vllm is not supported"),
        ({"remove_unused_columns": True}, "would remove the prompts"),
        ({"train_sampling_strategy": "group_by_length"}, "looks for input_ids"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ends_trls_trainer_or_is_not_rehearsed_is_refused(name: str, tmp_path: pathlib.Path) -> None:
    method, job = method_of(name), Job(method=name, model="model", dataset=None, arguments={"max_length": 64})
    known = counting_arguments(job, str(tmp_path))
    method.check(method.configs(known), to_train=False)
    for given, told in REFUSED[name]:
        with pytest.raises(UsageError, match=told):
            method.check(method.configs(known | given), to_train=False)


def test_a_job_without_a_teacher_or_a_reward_is_refused() -> None:
    for name, row in METHODS.items():
        method, argument = method_of(name), row.teacher_argument or row.reward_model_argument
        if argument is None:
            continue
        assert f"--{argument} MODEL" in str(method.missing({}.get, to_train=True))
        assert method.missing({argument: "org/model"}.get, to_train=True) is None
        takes_functions = row.teacher_argument is None and name != "ppo"
        assert (method.missing({}.get, to_train=False) is None) == takes_functions, "a plan can do without a reward"
        assert (method.missing({"reward_funcs": ["mine.judge"]}.get, to_train=True) is None) == takes_functions
