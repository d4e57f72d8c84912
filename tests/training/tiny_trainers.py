"""Trainers of two layers with dropout, on rows of which some are far longer than others."""

import importlib
import pathlib
import random
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from autotrain_mem.types.methods_table import METHODS as METHODS_OF_AUTOFIT

METHODS = ("sft", "reward", "dpo", "grpo", "rloo", "distillation", "online_dpo", "gkd")
SIDES = 13
"""Rows of the data: the longest is not among the first."""

ARGUMENTS = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
OF_METHOD = {
    "sft": {},
    "reward": {"disable_dropout": False},
    "dpo": {"disable_dropout": False},
    "grpo": {"num_generations": 2, "max_completion_length": 4},
    "rloo": {"num_generations": 2, "max_completion_length": 4},
    "cpo": {"disable_dropout": False, "loss_type": "simpo", "cpo_alpha": 0.0},
    "distillation": {"max_completion_length": 4},
    "online_dpo": {"max_new_tokens": 4, "disable_dropout": False},
    "gkd": {"max_new_tokens": 4, "disable_dropout": False},
}


def words(count: int) -> str:
    return " ".join(["apple"] * count)


def lengths() -> list[int]:
    draw = random.Random(0)
    return [*(draw.randrange(2, 6) for _ in range(SIDES - 3)), 30, 3, 24]


def rows(method: str) -> Any:
    longer = [words(count) for count in lengths()]
    if method == "gkd":
        asked = {"role": "user", "content": words(2)}
        return Dataset.from_dict({"messages": [[asked, {"role": "assistant", "content": each}] for each in longer]})
    if method == "sft":
        return Dataset.from_dict({"text": longer})
    if method in ("reward", "dpo", "cpo"):
        columns = {"chosen": longer, "rejected": [words(2)] * SIDES}
        return Dataset.from_dict(columns | ({"prompt": [words(2)] * SIDES} if method != "reward" else {}))
    return Dataset.from_dict({"prompt": longer})


def differing(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def trainer(
    method: str, model: pathlib.Path, folder: pathlib.Path, reward: Callable[..., Any] = differing, **changes: Any
) -> Any:
    home = importlib.import_module(METHODS_OF_AUTOFIT[method].module.rpartition(".")[0])
    name = METHODS_OF_AUTOFIT[method].title
    evaluation = changes.pop("eval_dataset", None)
    build, kind = changes.pop("build", {}), changes.pop("kind", None)
    args = getattr(home, f"{name}Config")(output_dir=str(folder), **ARGUMENTS | OF_METHOD[method] | changes)
    judged = {"reward_funcs": reward} if method in ("grpo", "rloo", "online_dpo") else {}
    judged |= {"teacher_model": teacher(model)} if method in ("distillation", "gkd") else {}
    judged |= {"processing_class": AutoTokenizer.from_pretrained(model)} if method in ("gkd", "online_dpo") else {}
    given = {"train_dataset": rows(method), "eval_dataset": evaluation} | judged | build
    if method == "online_dpo":
        from autotrain_mem.trainers import online_dpo_trainer as home
    return (kind or getattr(home, f"{name}Trainer"))(model=loaded(method, model), args=args, **given)


def loaded(method: str, model: pathlib.Path) -> Any:
    """The trainers of trl.experimental load a name in the dtype of its weights, by ``device_map``."""
    return AutoModelForCausalLM.from_pretrained(model) if METHODS_OF_AUTOFIT[method].is_experimental else str(model)


def teacher(model: pathlib.Path) -> Any:
    """A model like this one, which knows something else."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model, initializer_range=0.5))


def outcome(made: Any) -> tuple[list[dict[str, float]], list[bytes]]:
    """Everything that was logged but times, and all weights to the bit."""
    timed = ("runtime", "per_second", "step_time")
    logged = [
        {name: value for name, value in entry.items() if not any(word in name for word in timed)}
        for entry in made.state.log_history
    ]
    return logged, [value.detach().numpy().tobytes() for value in made.model.state_dict().values()]
