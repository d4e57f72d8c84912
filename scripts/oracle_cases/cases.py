"""Lists what the oracle runs: command lines on tiny models, recorded allocations, trainings with faults, recipes."""

import itertools
import pathlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from recipe_plans.rows import all_rows, flags
from survival_cases.jobs import MODES

from oracle_cases.execute import followed, printed, replayed, trained

Case = Callable[[], dict[str, Any]]

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "allocator" / "recorded"

METHODS: Mapping[str, str] = {
    "sft": "--dataset short_text",
    "reward": "--dataset short_pairs",
    "dpo": "--dataset short_pairs",
    "grpo": "--dataset short_prompts --reward_model_name_or_path judge --num_generations 2 --max_completion_length 4",
    "rloo": "--dataset short_prompts --reward_funcs judging.short --num_generations 2 --max_completion_length 4",
    "ppo": "--dataset short_prompts --reward_model_path judge --response_length 4 --num_ppo_epochs 1",
}
CHECKPOINTING: Mapping[str, str] = {
    "checkpointing": "--gradient_checkpointing true",
    "no checkpointing": "--gradient_checkpointing false",
}
BATCHES: Mapping[str, int] = {"sft": 16, "reward": 16, "dpo": 16, "grpo": 16, "rloo": 16, "ppo": 4}
"""The effective batch of each plan. PPO's is smaller, since more micro-batches make its rehearsals slower."""
CARDS_MIB: Mapping[str, tuple[int, int, int]] = {
    "sft": (30, 26, 32),
    "reward": (46, 44, 56),
    "dpo": (76, 64, 72),
    "grpo": (48, 60, 54),
    "rloo": (48, 60, 52),
    "ppo": (46, 44, 46),
}
"""For each mode (full, LoRA, 4-bit), a card that is too small for most of these batches as one micro-batch."""
SMALL_MIB: Mapping[str, int] = {"sft": 27, "reward": 16, "dpo": 28, "grpo": 36, "rloo": 34, "ppo": 30}
"""Cards for plans that may pull any lever, and must pull some; for the reward model no lever suffices."""

VARIANTS: Mapping[str, str] = {
    "8-bit": "sft --dataset short_text --max_length 96 --use_peft --load_in_8bit",
    "nested 4-bit": "sft --dataset short_text --max_length 96 --use_peft --load_in_4bit --use_bnb_nested_quant",
    "bfloat16": "sft --dataset short_text --max_length 96 --dtype bfloat16",
    "packed": "sft --dataset short_text --max_length 96 --packing",
    "longest row": "sft --dataset short_text --max_length auto",
    "percentile": "dpo --dataset short_pairs --max_length p90",
    "evaluated": "sft --dataset short_text --max_length 96 --eval_strategy steps --eval_steps 6",
    "activations offloaded": "sft --dataset short_text --max_length 96 --activation_offloading",
    "optimizer offloaded": "sft --dataset short_text --max_length 96 --optimizer_offload",
    "expandable segments": "sft --dataset short_text --max_length 96 --expandable_segments",
    "8-bit optimizer": "sft --dataset short_text --max_length 96 --optim adamw_8bit",
    "adafactor": "sft --dataset short_text --max_length 96 --optim adafactor",
    "reference model": "grpo --dataset short_prompts --reward_model_name_or_path judge --num_generations 2 "
    "--max_completion_length 4 --beta 0.04 --num_iterations 2",
    "vLLM beside": "grpo --dataset short_prompts --reward_funcs judging.short --num_generations 2 "
    "--max_completion_length 4 --use_vllm --vllm_mode colocate",
    "precomputed reference": "dpo --dataset short_pairs --max_length 96 --precompute_ref_log_probs",
    "two mini-batches": "ppo --dataset short_prompts --reward_model_path judge --response_length 4 "
    "--num_ppo_epochs 2 --num_mini_batches 2",
}
"""Estimates with settings that :func:`product` leaves out."""
FAMILIES = ("gpt2", "gemma3", "llama", "qwen3", "qwen3_moe")
LAYERS = 12
"""Layers of the model that is rehearsed with fewer layers."""

TRAINED: Mapping[str, tuple[str, str]] = {
    "sft full, out of memory in backward": (
        f"sft {METHODS['sft']} {MODES['full']} --eval_strategy steps --eval_steps 6",
        "oom:backward:400",
    ),
    "sft LoRA, out of memory in forward": (f"sft {METHODS['sft']} {MODES['LoRA']}", "oom:forward:700"),
    "dpo full, killed": (f"dpo {METHODS['dpo']} {MODES['full']}", "kill:9000"),
    "grpo full, out of memory in generation": (f"grpo {METHODS['grpo']} {MODES['full']}", "oom:generate:300"),
    "ppo full, out of memory in backward": (f"ppo {METHODS['ppo']} {MODES['full']}", "oom:backward:400"),
}
"""The flags of each run, and its injected fault (``AUTOFIT_MISHAPS``)."""


def commands(models: pathlib.Path | None) -> dict[str, Case]:
    """Returns the cases that run commands, by name, the slowest first; recipes only if there are models for them."""
    kinds = (trainings(), free_plans(), product(), variants(), others(), {} if models is None else recipe_plans(models))
    return {name: case for kind in kinds for name, case in kind.items()}


def product() -> dict[str, Case]:
    """Returns an estimate and a plan for every method, mode and checkpointing; other settings are TRL's defaults."""
    found: dict[str, Case] = {}
    for method, (mode, pinned) in itertools.product(METHODS, itertools.product(MODES, CHECKPOINTING)):
        words = f"{method} --model model {METHODS[method]} {MODES[mode]} {CHECKPOINTING[pinned]}"
        length = "" if method in ("grpo", "rloo", "ppo") else "--max_length 96"
        card = CARDS_MIB[method][list(MODES).index(mode)]
        sizes = f"--per_device_train_batch_size 4 --gradient_accumulation_steps 2 {length}"
        name = f"{method}, {mode}, {pinned}"
        found[f"estimate: {name}"] = partial(printed, f"estimate {words} {sizes} --gpu a100-80gb")
        searched = f"--effective_batch_size {BATCHES[method]} --fit lossless --gpu {card}MiB"
        found[f"plan: {name}"] = partial(printed, f"plan {words} {searched}")
    return found


def free_plans() -> dict[str, Case]:
    """Returns plans that may pull every lever, and plans for a model that is rehearsed with fewer layers."""
    words = {method: f"plan {method} {METHODS[method]} --effective_batch_size {BATCHES[method]}" for method in METHODS}
    small = {f"plan: {name}, free": f"{words[name]} --model model --gpu {SMALL_MIB[name]}MiB" for name in METHODS}
    deep = {f"plan: {name}, {LAYERS} layers": f"{words[name]} --model deep --gpu 64MiB" for name in ("sft", "dpo")}
    return {name: partial(printed, line) for name, line in {**small, **deep}.items()}


def variants() -> dict[str, Case]:
    """Returns estimates that each vary one setting, model or device."""
    lines = {name: f"{words} --model model --gpu l40s" for name, words in VARIANTS.items()}
    for family in FAMILIES:
        lines[family] = f"sft --model {family} --dataset short_text --max_length 96 --use_peft --gpu l40s"
    lines["card without bfloat16"] = "sft --model model --dataset short_text --max_length 96 --gpu t4"
    lines["CPU"] = "sft --model model --dataset short_text --max_length 96 --use_cpu"
    small = "--per_device_train_batch_size 4 --gradient_accumulation_steps 2"
    return {f"estimate: {name}": partial(printed, f"estimate {line} {small}") for name, line in lines.items()}


def others() -> dict[str, Case]:
    """Returns a comparison of cards, a plan that is followed, and the catalog of cards."""
    job = "sft --model model --dataset short_text"
    return {
        "cards": partial(printed, f"plan {job} --effective_batch_size 16 --gpu all"),
        "followed plan": partial(followed, f"plan {job} --effective_batch_size 16 --gpu 30MiB", "--gpu 32MiB"),
        "catalog": partial(printed, "gpus"),
    }


def replays() -> dict[str, Case]:
    """Returns the recorded sequences of allocations, which are replayed through the simulated allocator."""
    return {f"allocator: {path.stem}": partial(replayed, path) for path in sorted(RECORDED.glob("*.json"))}


def trainings() -> dict[str, Case]:
    """Returns whole runs on simulated cards, each with one fault."""
    shared = "--model model --max_steps 8 --learning_rate 1e-3 --logging_steps 1 --save_steps 3 --fit lossless"
    batch = "--effective_batch_size 8 --seed 7"
    return {
        f"training: {name}": partial(trained, f"{words} {shared} {batch} --gpu 64MiB --simulate", fault)
        for name, (words, fault) in TRAINED.items()
    }


def recipe_plans(models: pathlib.Path) -> dict[str, Case]:
    """Returns a plan of every recipe for each of its cards, with a folder of configs and rows of ``max_length``."""
    found: dict[str, Case] = {}
    for recipe, card in all_rows():
        line = f"plan {recipe.method} --recipe {recipe.name} --gpu {card} {' '.join(flags(recipe, models))}"
        found[f"recipe: {recipe.name}, {card}"] = partial(printed, line, models=models)
    return found
