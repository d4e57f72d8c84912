"""Lists the cards for which each recipe is planned, and the configs that stand in for other models' configs."""

import pathlib
from collections.abc import Iterator

from autotrain_mem.support.yaml_files import Recipe, recipes

OTHER_CARD = {
    "cpo-qwen2.5-0.5b-simpo": "rtx4090",
    "distillation-qwen2.5-0.5b": "l40s",
    "dpo-qwen2.5-7b-lora": "l40s",
    "gkd-qwen2.5-0.5b": "l40s",
    "kto-qwen2.5-0.5b": "rtx4090",
    "grpo-qwen2.5-3b-lora": "l40s",
    "grpo-qwen3-8b-qlora": "rtx4090",
    "online_dpo-qwen2.5-0.5b": "l40s",
    "orpo-qwen2.5-0.5b": "rtx4090",
    "ppo-qwen2.5-0.5b": "l40s",
    "ppo-qwen2.5-7b-lora": "a100-40gb",
    "reward-gemma3-1b-lora-8k": "rtx4090",
    "reward-gemma3-1b-lora-16k": "rtx4090",
    "reward-gemma3-1b-lora-32k": "l40s",
    "rloo-qwen2.5-0.5b": "rtx4090",
    "sft-llama3.1-8b-full": "a100-40gb",
    "sft-llama3.1-8b-lora-8bit": "l40s",
    "sft-llama3.1-8b-qlora": "rtx4090",
    "sft-qwen2.5-0.5b": "rtx4090",
    "sft-qwen3-30b-a3b-lora": "h100-80gb",
}
"""The second card of each recipe, besides the one in its header. Both have the same kernels, to share rehearsals."""

SAME_SIZES = {
    "Qwen/Qwen2.5-0.5B-Instruct": "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-1.5B-Instruct": "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen2.5-3B-Instruct": "Qwen/Qwen2.5-3B",
    "Qwen/Qwen2.5-7B-Instruct": "Qwen/Qwen2.5-7B",
    "trl-lib/Qwen2-0.5B-Reward": "Qwen/Qwen2.5-0.5B",
}
"""Models -> models of the same sizes: a fine-tuned model has its base's, and Qwen2-0.5B has those of Qwen2.5-0.5B."""

_MODELS = (*("model_name_or_path", "reward_model_path", "reward_model_name_or_path"), "teacher_model_name_or_path")


def cards(recipe: Recipe) -> tuple[str, ...]:
    """Returns the recipe's own card and a second one; only its own if the recipe is for several GPUs."""
    return (recipe.card,) if recipe.gpus > 1 else (recipe.card, OTHER_CARD[recipe.name])


def all_rows() -> Iterator[tuple[Recipe, str]]:
    return ((recipe, card) for recipe in recipes() for card in cards(recipe))


def settings(recipe: Recipe) -> dict[str, object]:
    """Returns the keys of the recipe's file, including the block ``autofit``."""
    import yaml

    read: dict[str, object] = yaml.safe_load(recipe.path.read_text(encoding="utf-8"))
    return read


def flags(recipe: Recipe, models: pathlib.Path) -> list[str]:
    """Returns flags that replace hub ids by folders of configs.

    Example: ``["--model_name_or_path", "models/Qwen/Qwen2.5-0.5B"]``.
    """
    named = {name: str(value) for name, value in settings(recipe).items() if name in _MODELS}
    return [word for name, value in named.items() for word in (f"--{name}", str(folder(models, value)))]


def folder(models: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the folder with the config of a hub id."""
    return models / SAME_SIZES.get(name, name)
