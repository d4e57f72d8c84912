"""Recipes train for real, by their commands: two steps of a tiny model on a simulated card."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
import pytest
from recipe_plans.rows import SAME_SIZES, settings

from autotrain_mem.support.yaml_files import Recipe, recipes
from autotrain_mem.types.methods_table import REWARD_MODEL_ARGUMENTS
from tests.place import Autofit

pytestmark = pytest.mark.slow

STEPS = 2
SHARED = (
    f"--gpu 400MiB --simulate --no_probe --json --max_steps {STEPS} --logging_steps 1 --save_strategy no "
    "--fit lossless --forbid activation_offloading --gradient_checkpointing false --effective_batch_size 8 "
    "--per_device_train_batch_size 8"
)
SHORT = {
    "sft": "--dataset data.jsonl --max_length 32",
    "grpo": "--dataset prompts.jsonl --max_completion_length 8 --reward_funcs think_format_reward",
    "ppo": "--dataset prompts.jsonl --response_length 8 --num_ppo_epochs 1 --local_rollout_forward_batch_size 8",
}
"""Lengths for a CPU; what is trained, and how, stays the recipe's. The recipes' own reward needs a package."""
TRAINED = ["sft-llama3.1-8b-lora-8bit", "grpo-qwen3-8b-qlora", "ppo-qwen2.5-7b-lora"]
"""One with each kind of a quantized base and of an optimizer on the host, and PPO's adapter. Plain training of each
method is that of ``tests/cli/test_methods.py``."""


def tiny(model_folder: Callable[[str], Path], name: str) -> str:
    """Where a tiny model of the architecture lies, weights and all: ``Qwen/Qwen3-8B`` -> a tiny Qwen3."""
    return str(model_folder(architectures.TINY[architectures.FACTS[SAME_SIZES.get(name, name)]["model_type"]]))


@pytest.mark.parametrize("recipe", [each for each in recipes() if each.name in TRAINED], ids=lambda recipe: recipe.name)
def test_a_recipe_trains_two_steps(recipe: Recipe, model_folder: Callable[[str], Path], autofit: Autofit) -> None:
    keys: dict[str, Any] = settings(recipe)
    named = {"model": keys["model_name_or_path"]} | {
        name: keys[name] for name in REWARD_MODEL_ARGUMENTS if name in keys
    }
    folders = [word for name, model in named.items() for word in (f"--{name}", tiny(model_folder, model))]
    words = f"--recipe {recipe.name} {SHARED} {SHORT[recipe.method]} --output_dir trained/{recipe.name}".split()
    ran = autofit(recipe.method, *words, *folders)
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert told["run"]["steps"] == STEPS
    assert isinstance(told["run"]["last_loss"], float)
    knobs = told["plan"]["knobs"]
    assert all(knobs[name] == keys.get(name, False) for name in ("use_peft", "load_in_4bit", "load_in_8bit"))
    assert knobs["optimizer_offload"] == keys["autofit"].get("optimizer_offload", False)
