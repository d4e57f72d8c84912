"""What each method is asked for: flags that all its runs share, and those of full training, LoRA and a 4-bit base."""

from __future__ import annotations

from collections.abc import Mapping

ROWS_PER_STEP = 40
"""It divides the thousand rows, so that every step is whole: 25 steps see all of them."""
ONLINE = ("grpo", "rloo", "ppo")
METHODS: Mapping[str, str] = {
    "sft": "--dataset text.jsonl",
    "reward": "--dataset pairs.jsonl",
    "dpo": "--dataset pairs.jsonl",
    "grpo": "--dataset prompts.jsonl --reward_model_name_or_path judge --num_generations 2 --max_completion_length 6",
    "rloo": "--dataset prompts.jsonl --reward_funcs judging.short --num_generations 2 --max_completion_length 6",
    "ppo": "--dataset prompts.jsonl --reward_model_path judge --response_length 6 --num_ppo_epochs 1",
}
MODES: Mapping[str, str] = {
    "full": "--use_peft false --load_in_4bit false",
    "LoRA": "--use_peft --load_in_4bit false --lora_dropout 0.0",
    "4-bit": "--use_peft --load_in_4bit --lora_dropout 0.0",
}
SHARED = "--model model --num_train_epochs 1 --learning_rate 1e-3 --logging_steps 1 --fit lossless"


def rows_per_step(method: str) -> int:
    """Rows of an effective batch: of the two completions of a prompt each is one."""
    return ROWS_PER_STEP * (2 if method in ("grpo", "rloo") else 1)


def flags(method: str, mode: str) -> list[str]:
    """Of a run over all rows."""
    batch = f"--effective_batch_size {rows_per_step(method)}"
    return f"{SHARED} {METHODS[method]} {MODES[mode]} {batch}".split()
