"""Every recipe trains for real, by its command: three steps of a tiny model of its architecture on a simulated card."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import architectures
import pytest
from recipe_plans.rows import SAME_SIZES, settings
from tiny import tiny_folder

from autotrain_mem.cli import commands
from autotrain_mem.cookbook import Recipe, recipes
from autotrain_mem.quickstart import data

pytestmark = pytest.mark.slow

STEPS = 3
SHARED = (
    f"--gpu 400MiB --simulate --json --max_steps {STEPS} --logging_steps 1 --save_strategy no --fit lossless "
    "--gradient_checkpointing false --effective_batch_size 8 --per_device_train_batch_size 8"
)
SHORT = {
    "sft": "--max_length 32",
    "reward": "--max_length 512",
    "dpo": "--max_length 256",
    "grpo": "--max_completion_length 8 --reward_funcs think_format_reward",
    "rloo": "--max_completion_length 8",
    "ppo": "--response_length 8 --local_rollout_forward_batch_size 8",
}
"""Lengths for a CPU. What is trained, and how, is the recipe's. A pair is dropped, not cut."""
REWARD_MODELS = ("reward_model_path", "reward_model_name_or_path")


@pytest.fixture(scope="session")
def rows(place: pathlib.Path) -> dict[str, str]:
    data.write_dataset(place / "chat.jsonl", rows=40, seed=0)
    data.write_rows(place / "pairs.jsonl", data.preferences(40, seed=0))
    data.write_rows(place / "prompts.jsonl", data.questions(40, seed=0))
    pairs, prompts = dict.fromkeys(("reward", "dpo"), "pairs"), dict.fromkeys(("grpo", "rloo", "ppo"), "prompts")
    return {method: f"{name}.jsonl" for method, name in {"sft": "chat", **pairs, **prompts}.items()}


@pytest.fixture(scope="session")
def tiny(place: pathlib.Path) -> Callable[[str], str]:
    """``tiny("Qwen/Qwen3-8B")``: a folder with a tiny Qwen3, weights and all."""

    def made(name: str) -> str:
        family = architectures.TINY[architectures.FACTS[SAME_SIZES.get(name, name)]["model_type"]]
        folder = place / "tiny" / family
        return str(folder if folder.exists() else tiny_folder(folder, family))

    return made


@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_trains_three_steps(
    recipe: Recipe,
    rows: dict[str, str],
    tiny: Callable[[str], str],
    printed: Callable[..., str],
) -> None:
    said: dict[str, Any] = settings(recipe)
    judges = [word for name in REWARD_MODELS if name in said for word in (f"--{name}", tiny(str(said[name])))]
    words = f"--recipe {recipe.name} --dataset {rows[recipe.method]} {SHARED} {SHORT[recipe.method]}".split()
    folder = f"trained/{recipe.name}"
    model = tiny(str(said["model_name_or_path"]))
    told = json.loads(printed(commands.train, recipe.method, [*words, "--model", model, "--output_dir", folder, *judges]))
    assert told["run"]["steps"] == STEPS
    assert isinstance(told["run"]["last_loss"], float)
    knobs = told["plan"]["knobs"]
    for name in ("use_peft", "load_in_4bit", "load_in_8bit"):
        assert knobs[name] == said.get(name, False)
    assert knobs["optimizer_offload"] == said["autofit"].get("optimizer_offload", False)
