"""What is found before anything is rehearsed: exit code and arguments, by the name of the golden file."""

from __future__ import annotations

from bad_methods import CARD

_PLAN = f"plan sft --model tiny {CARD} --dataset data.jsonl"
_PAIRS = f"{CARD} --dataset pairs.jsonl"

CASES = {
    "several_at_once": (
        33,
        f"plan sft --model tiny {CARD} --dataset other_columns.jsonl --pad_token nope --use_peft "
        "--lora_target_modules nope never",
    ),
    "lora_target_alone": (2, f"{_PLAN} --use_peft --lora_target_modules q_proj"),
    "pad_token_unknown": (2, f"{_PLAN} --pad_token nope"),
    "end_token_unknown": (2, f"{_PLAN} --eos_token nope"),
    "no_template_dpo": (33, f"plan dpo --model no_template {_PAIRS}"),
    "vocabulary_too_small": (24, f"plan sft --model small_vocabulary {CARD} --dataset data.jsonl"),
}
