"""What a recipe's command is told so that it trains in seconds: a tiny model of its architecture, short rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
from recipe_plans.rows import SAME_SIZES, settings

from autotrain_mem.methods.table import REWARD_MODEL_ARGUMENTS
from autotrain_mem.recipe_files import Recipe
from tests.place import Autofit

STEPS = 3
SHARED = (
    f"--gpu 400MiB --simulate --no_probe --json --max_steps {STEPS} --logging_steps 1 --save_strategy no "
    "--fit lossless --gradient_checkpointing false --effective_batch_size 8 --per_device_train_batch_size 8"
)
SHORT = {
    "sft": "--dataset data.jsonl --max_length 32",
    "reward": "--dataset pairs.jsonl --max_length 512",
    "dpo": "--dataset pairs.jsonl --max_length 256",
    "kto": "--dataset pairs.jsonl --max_length 256",
    "grpo": "--dataset prompts.jsonl --max_completion_length 8 --reward_funcs think_format_reward",
    "rloo": "--dataset prompts.jsonl --max_completion_length 8 --reward_funcs think_format_reward",
    "ppo": "--dataset prompts.jsonl --response_length 8 --local_rollout_forward_batch_size 8",
}
"""Lengths for a CPU; what is trained, and how, stays the recipe's. The recipes' own reward needs a package."""


def words(recipe: Recipe, model_folder: Callable[[str], Path]) -> list[str]:
    def tiny(name: str) -> str:
        """``tiny("Qwen/Qwen3-8B")``: where a tiny Qwen3 lies, weights and all."""
        return str(model_folder(architectures.TINY[architectures.FACTS[SAME_SIZES.get(name, name)]["model_type"]]))

    keys: dict[str, Any] = settings(recipe)
    judges = [word for name in REWARD_MODEL_ARGUMENTS if name in keys for word in (f"--{name}", tiny(keys[name]))]
    folders = ["--model", tiny(keys["model_name_or_path"]), "--output_dir", f"trained/{recipe.name}"]
    return [*f"--recipe {recipe.name} {SHARED} {SHORT[recipe.method]}".split(), *folders, *judges]


def check_trains(recipe: Recipe, model_folder: Callable[[str], Path], autofit: Autofit) -> None:
    """The command trains to its last step, what the recipe says is trained."""
    ran = autofit(recipe.method, *words(recipe, model_folder))
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert told["run"]["steps"] == STEPS
    assert isinstance(told["run"]["last_loss"], float)
    keys: dict[str, Any] = settings(recipe)
    knobs = told["plan"]["knobs"]
    for name in ("use_peft", "load_in_4bit", "load_in_8bit"):
        assert knobs[name] == keys.get(name, False)
    assert knobs["optimizer_offload"] == keys["autofit"].get("optimizer_offload", False)
