"""What can be wrong with a command line of each method: exit code and arguments, by the name of the golden file."""

from __future__ import annotations

CARD = "--gpu 300MiB"
_ONLINE = f"plan grpo --model tiny {CARD} --dataset prompts.jsonl"
_PPO = f"plan ppo --model tiny {CARD} --dataset prompts.jsonl"
_ESTIMATE = f"estimate sft --model tiny {CARD} --max_length 16"

REWARDS = {
    "reward_raises": (35, f"{_ONLINE} --reward_funcs my_rewards.raises"),
    "reward_wrong_count": (35, f"{_ONLINE} --reward_funcs my_rewards.short my_rewards.one"),
    "reward_no_list": (35, f"{_ONLINE} --reward_funcs my_rewards.number"),
    "reward_no_numbers": (35, f"{_ONLINE} --reward_funcs my_rewards.words"),
    "reward_unknown": (2, f"{_ONLINE} --reward_funcs lenght_reward"),
    "reward_no_function": (2, f"{_ONLINE} --reward_funcs my_rewards.shorter"),
    "reward_no_module": (2, f"{_ONLINE} --reward_funcs no_rewards.short"),
    "reward_not_callable": (2, f"{_ONLINE} --reward_funcs my_rewards.THRESHOLD"),
    "reward_import_fails": (2, f"{_ONLINE} --reward_funcs broken_rewards.short"),
    "reward_misspelled": (2, f"{_ONLINE} --reward_funcs think_fromat_reward"),
    "reward_missing": (2, f"rloo --model tiny {CARD} --simulate --dataset prompts.jsonl"),
    "reward_model_missing": (20, f"{_ONLINE} --reward_model_name_or_path nowhere"),
    "reward_model_no_tokenizer": (20, f"{_ONLINE} --reward_model_name_or_path no_tokenizer"),
    "reward_model_adapter": (20, f"{_PPO} --reward_model_path adapter"),
    "reward_model_no_classifier": (21, f"{_PPO} --reward_model_path mamba"),
    "reward_no_classifier": (21, f"plan reward --model mamba {CARD} --dataset pairs.jsonl"),
    "ppo_no_reward_model": (2, _PPO),
    "ppo_pad_is_end": (2, f"plan ppo --model same_pad {CARD} --dataset prompts.jsonl --reward_model_path judge"),
}

DATA = {
    "data_dpo_prompts": (33, f"plan dpo --model tiny {CARD} --dataset prompts.jsonl"),
    "data_reward_messages": (33, f"plan reward --model tiny {CARD} --dataset data.jsonl"),
    "data_grpo_messages": (33, f"plan grpo --model tiny {CARD} --dataset data.jsonl"),
    "data_ppo_text": (33, f"plan ppo --model tiny {CARD} --dataset text.jsonl --reward_model_path judge"),
    "data_sft_pairs": (33, f"plan sft --model tiny {CARD} --dataset pairs.jsonl"),
    "data_text_and_chat": (33, f"plan dpo --model tiny {CARD} --dataset text_and_chat.jsonl"),
    "data_prompt_is_empty": (33, f"plan grpo --model tiny {CARD} --dataset prompt_is_empty.jsonl"),
    "data_every_pair_dropped": (31, f"plan reward --model tiny {CARD} --dataset pairs.jsonl --max_length 16"),
    "prompt_beyond_context": (22, f"plan rloo --model tiny {CARD} --dataset long_prompt.jsonl"),
    "completion_beyond_context": (22, f"{_ONLINE} --max_completion_length 2000"),
}

SETTINGS = {
    "groups_do_not_divide": (40, f"{_ONLINE} --effective_batch_size 12"),
    "groups_do_not_divide_generation": (40, f"{_ONLINE} --generation_batch_size 12"),
    "mini_batches_do_not_divide": (40, f"{_PPO} --reward_model_path judge --num_mini_batches 3"),
    "quantized_twice": (21, f"estimate sft --model quantized {CARD} --max_length 16 --load_in_8bit --use_peft"),
    "quantized_full": (21, f"estimate sft --model quantized {CARD} --max_length 16"),
    "quantize_full": (2, f"{_ESTIMATE} --load_in_4bit"),
    "quantize_twice": (2, f"{_ESTIMATE} --load_in_4bit --load_in_8bit --use_peft"),
    "prompt_length_sft": (2, f"{_ESTIMATE} --prompt_length 100"),
    "flash_attention_on_t4": (
        2,
        "estimate sft --model tiny --gpu t4 --max_length 16 --attn_implementation flash_attention_2",
    ),
    "liger_unknown_model": (2, f"estimate sft --model mamba {CARD} --max_length 16 --use_liger_kernel"),
    "liger_simulated": (2, f"sft --model tiny {CARD} --simulate --dataset data.jsonl --use_liger_kernel"),
    "prompt_length_zero": (2, f"{_ONLINE} --prompt_length 0"),
    "half_precision_twice": (2, f"{_ESTIMATE} --fp16 --dtype float16"),
    "optimizer_not_rehearsed": (2, f"{_ESTIMATE} --optim adamw_torch_4bit"),
    "optimizer_not_offloaded": (2, f"{_ESTIMATE} --optimizer_offload --optim adafactor"),
    "optimizer_offloaded_ppo": (2, f"{_PPO} --reward_model_path judge --optimizer_offload"),
    "grpo_max_length": (2, f"{_ONLINE} --max_length 64"),
    "grpo_percentile": (2, f"{_ONLINE} --max_length p99"),
    "grpo_max_prompt_length": (2, f"{_ONLINE} --max_prompt_length 64"),
    "ppo_max_completion_length": (2, f"{_PPO} --max_completion_length 64"),
    "dpo_reward_funcs": (2, f"plan dpo --model tiny {CARD} --dataset pairs.jsonl --reward_funcs my_rewards.short"),
}

CASES = {**REWARDS, **DATA, **SETTINGS}
