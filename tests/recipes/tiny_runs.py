"""What a recipe's command is told so that it trains in seconds: a tiny model of its architecture, short rows."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import architectures
from recipe_plans.rows import SAME_SIZES, settings
from tiny import tiny_folder

from autotrain_mem.cli import commands
from autotrain_mem.methods.table import REWARD_MODEL_ARGUMENTS
from autotrain_mem.quickstart import data
from autotrain_mem.recipe_files import Recipe

STEPS = 3
SHARED = (
    f"--gpu 400MiB --simulate --no_probe --json --max_steps {STEPS} --logging_steps 1 --save_strategy no "
    "--fit lossless --gradient_checkpointing false --effective_batch_size 8 --per_device_train_batch_size 8"
)
SHORT = {
    "sft": "--dataset chat.jsonl --max_length 32",
    "reward": "--dataset pairs.jsonl --max_length 512",
    "dpo": "--dataset pairs.jsonl --max_length 256",
    "kto": "--dataset pairs.jsonl --max_length 256",
    "grpo": "--dataset prompts.jsonl --max_completion_length 8 --reward_funcs think_format_reward",
    "rloo": "--dataset prompts.jsonl --max_completion_length 8 --reward_funcs think_format_reward",
    "ppo": "--dataset prompts.jsonl --response_length 8 --local_rollout_forward_batch_size 8",
}
"""Lengths for a CPU; what is trained, and how, stays the recipe's. The recipes' own reward needs a package."""


@dataclass(frozen=True)
class Place:
    """A folder with rows of every kind, and with a tiny model of each architecture that is asked for."""

    folder: pathlib.Path

    def write_rows(self) -> None:
        data.write_dataset(self.folder / "chat.jsonl", rows=40, seed=0)
        data.write_rows(self.folder / "pairs.jsonl", data.preferences(40, seed=0))
        data.write_rows(self.folder / "prompts.jsonl", data.questions(40, seed=0))

    def tiny(self, name: str) -> str:
        """``tiny("Qwen/Qwen3-8B")``: where a tiny Qwen3 lies, weights and all."""
        family = architectures.TINY[architectures.FACTS[SAME_SIZES.get(name, name)]["model_type"]]
        folder = self.folder / "tiny" / family
        return str(folder if folder.exists() else tiny_folder(folder, family))

    def words(self, recipe: Recipe) -> list[str]:
        said: dict[str, Any] = settings(recipe)
        judges = [
            word for name in REWARD_MODEL_ARGUMENTS if name in said for word in (f"--{name}", self.tiny(said[name]))
        ]
        folders = ["--model", self.tiny(said["model_name_or_path"]), "--output_dir", f"trained/{recipe.name}"]
        return [*f"--recipe {recipe.name} {SHARED} {SHORT[recipe.method]}".split(), *folders, *judges]


def check_trains(recipe: Recipe, place: Place, printed: Callable[..., str]) -> None:
    """The command trains to its last step, what the recipe says is trained."""
    told = json.loads(printed(commands.train, recipe.method, place.words(recipe)))
    assert told["run"]["steps"] == STEPS
    assert isinstance(told["run"]["last_loss"], float)
    said: dict[str, Any] = settings(recipe)
    knobs = told["plan"]["knobs"]
    for name in ("use_peft", "load_in_4bit", "load_in_8bit"):
        assert knobs[name] == said.get(name, False)
    assert knobs["optimizer_offload"] == said["autofit"].get("optimizer_offload", False)
