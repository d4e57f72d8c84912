"""Words of one command line that contradict each other: exit code and arguments, by the name of the golden file."""

from __future__ import annotations

from bad_methods import CARD

_ESTIMATE = f"estimate sft --model tiny {CARD} --max_length 16"
_TRAIN = "sft --model tiny --dataset data.jsonl"
_ONLINE = f"grpo --model tiny {CARD} --dataset prompts.jsonl"

CASES = {
    "contradictions": (
        2,
        f"{_TRAIN} --gpu t4 --use_cpu --bf16 true --fp16 --load_in_4bit --load_in_8bit --forbid gradient_checkpointing "
        "--gradient_checkpointing true --prompt_length 5 --effective_batch_size 10 --per_device_train_batch_size 4 "
        "--gradient_accumulation_steps 4 --activation_offloading --optimizer_offload",
    ),
    "both_precisions": (2, f"{_ESTIMATE} --bf16 true --fp16"),
    "half_base_trained": (2, f"{_ESTIMATE} --fp16 --dtype bfloat16"),
    "fp16_offloaded": (2, f"{_ESTIMATE} --fp16 --optimizer_offload"),
    "fp16_on_cpu": (2, f"{_TRAIN} --use_cpu --fp16"),
    "flash_attention_on_cpu": (2, f"{_TRAIN} --use_cpu --attn_implementation flash_attention_2"),
    "offloaded_on_cpu": (2, f"{_TRAIN} --use_cpu --activation_offloading"),
    "simulated_and_not_trained": (2, f"{_TRAIN} {CARD} --simulate --plan_only"),
    "vllm_simulated": (2, f"{_ONLINE} --simulate --use_vllm"),
    "forbidden_and_given": (2, f"{_TRAIN} {CARD} --use_peft --forbid lora"),
    "batch_said_twice": (
        40,
        f"{_ESTIMATE} --effective_batch_size 10 --per_device_train_batch_size 4 --gradient_accumulation_steps 2",
    ),
    "generation_said_twice": (2, f"plan {_ONLINE} --generation_batch_size 8 --steps_per_generation 2"),
}
