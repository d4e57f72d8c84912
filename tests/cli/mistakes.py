"""Command lines with a mistake: the exit code, what is typed, and what the message must hold.

The third column lists flags, names and figures, with blanks between them and quotes around one that has a blank. More
mistakes, whose messages are compared with their whole text, are the files of ``golden``.
"""

CARD = "--gpu 300MiB"
TINY = f"--model tiny {CARD}"
TRAIN = "sft --model tiny --dataset data.jsonl"
SIMULATED = f"{TRAIN} {CARD} --simulate"
PLAN = f"plan sft {TINY}"
DATA = f"{PLAN} --dataset data.jsonl"
ESTIMATE = f"estimate sft {CARD}"
SHORT = f"{ESTIMATE} --model tiny --max_length 16"
GRPO = f"plan grpo {TINY} --dataset prompts.jsonl"
LACKING = f"{GRPO[5:]} --simulate --report_to clearml --reward_funcs"
PPO = f"plan ppo {TINY} --dataset prompts.jsonl"
ONE_RUNG = "--fit lossless --forbid micro_batch,gradient_checkpointing,activation_offloading,optimizer_offload"
FLASH = "--attn_implementation flash_attention_2"
PARTS = "--steps_per_generation 2"
JUDGED = f"{PPO} --reward_model_path judge"
_WRITES_ONE = "'autofit plan METHOD --model MODEL --gpu NAME --out plan.json'"

MISTAKES: dict[str, tuple[int, str, str]] = {
    # -- what is typed
    "launched_by_torchrun": (2, SIMULATED, "torchrun 'from autotrain_mem import SFTTrainer'"),
    "sharded_by_the_shell": (2, PLAN, "ACCELERATE_USE_FSDP unset --sharding --accelerate_config"),
    "launched_by_mpirun": (2, PLAN, "mpirun 'Start it without them'"),
    "opposite_of_flag": (2, f"sft {TINY} --no_use_peft", "'--use_peft false'"),
    "stray_words": (2, f"sft {TINY} extra words", "'extra words'"),
    "unknown_method": (2, "plan gpro", "'autofit plan grpo' sft reward dpo rloo ppo"),
    "no_method": (2, "plan --model tiny", "'autofit plan sft --model'"),
    "gpus_flag": (2, "gpus --foo", "--foo --json"),
    "number_expected": (2, f"sft {TINY} --learning_rate abc", "--learning_rate float abc"),
    "fit_choice": (2, f"{DATA} --fit nonsense", "nonsense all rounding lossless"),
    "slowdown_nan": (2, f"{PLAN} --max_slowdown nan", "'--max_slowdown nan'"),
    "headroom_words": (2, f"{DATA} --headroom nonsense", "--headroom nonsense 500MiB 8%"),
    "headroom_too_large": (2, f"{DATA} --headroom 200%", "--headroom 200% '300.0 MiB' 500MiB 8%"),
    "max_length_zero": (2, f"{DATA} --max_length 0", "--max_length 0 auto p99.9"),
    "effective_batch_zero": (2, f"{DATA} --effective_batch_size 0", "--effective_batch_size 0 1"),
    "effective_batch_endless": (2, f"{DATA} --effective_batch_size {10**11}", "--effective_batch_size 1,000,000,000"),
    "number_not_a_number": (2, f"sft {TINY} --learning_rate nan", "'--learning_rate is nan'"),
    "number_endless": (2, f"sft {TINY} --max_grad_norm inf --weight_decay=-1e400", "'--weight_decay is -inf' finite"),
    "tracker_unknown": (2, f"{DATA} --report_to wandbb", "wandbb 'Did you mean wandb'"),
    "no_checkpoint_folder": (2, f"{DATA} --resume_from_checkpoint nowhere", "nowhere --output_dir"),
    "trl_refuses": (2, f"{DATA} --loss_type nll --accelerator_config nowhere.json", "nowhere.json --help"),
    "streaming": (2, f"{DATA} --dataset_streaming", "--max_length --max_steps stream"),
    # -- config files
    "config_missing": (2, "sft --config nowhere.yaml", "nowhere.yaml --config"),
    "config_not_utf8": (2, "sft --config=not_utf8.yaml", "not_utf8.yaml UTF-8"),
    "config_axolotls_dpo": (2, "sft --config axolotls_dpo.yaml", "Axolotl 'autofit dpo --config axolotls_dpo.yaml'"),
    "config_factorys_galore": (2, "sft --config factorys_galore.yaml", "use_galore"),
    "config_recipes_template": (2, "sft --config recipes_template.yaml", "chat_template --chat_template_path"),
    "config_a_list": (2, "sft --config=a_list.yaml", "a_list.yaml 'key: value'"),
    "config_unknown_keys": (2, "sft --config unknown_keys.yaml", "learning_ratt learning_rate gpuu gpu"),
    "config_mistyped_blocks": (2, "sft --config mistyped_blocks.yaml", "'did you mean autofit' 'did you mean env'"),
    "config_autofit_number": (2, "sft --config autofit_number.yaml", "autofit:"),
    "config_a_pipe": (2, "sft --config pipe.yaml", "pipe.yaml 'no keys'"),
    "accelerator_pipe": (23, f"{DATA} --accelerator_config pipe.yaml", "pipe.yaml --accelerator_config"),
    "template_pipe": (23, f"{DATA} --chat_template_path pipe.yaml", "pipe.yaml --chat_template_path"),
    "template_wide": (24, f"{DATA} --chat_template_path wide.jinja", "67,108,864 --chat_template_path"),
    "config_laughs": (2, "sft --config laughs.yaml", "'more than 100,000 values'"),
    "config_itself": (2, "sft --config itself.yaml", "'more than 100,000 values'"),
    "config_too_deep": (2, "sft --config too_deep.yaml", "'nested too deeply'"),
    "config_too_large": (2, "sft --config too_large.yaml", "'larger than 256.0 KiB' --dataset"),
    "config_month_13": (2, "sft --config month_13.yaml", "month_13.yaml 'month must be in 1..12'"),
    "config_wrong_type": (2, "sft --config wrong_type.yaml", "'per_device_train_batch_size in wrong_type.yaml' abc"),
    "config_list_for_a_number": (2, "sft --config list_for_a_number.yaml", "list_for_a_number.yaml weight_decay float"),
    "config_axolotls_words": (2, "sft --config axolotls_words.yaml", "'micro_batch_size in axolotls_words.yaml' two"),
    "config_axolotls_length": (2, "sft --config axolotls_length.yaml", "axolotls_length.yaml sequence_len 2k number"),
    # -- cards
    "simulate_without_gpu": (2, "sft --model tiny --simulate", "--simulate '--gpu NAME' 6GiB"),
    "gpus_zero": (2, f"{PLAN} --gpus 0 --nodes -1", "'--gpus 0' '--nodes -1'"),
    "gpus_too_many": (2, f"{PLAN} --gpus 100000", "'--gpus 100000' 1,024"),
    "gpus_a_name": (2, "plan sft --model tiny --gpus t4", "t4 --gpu"),
    "gpus_to_compare": (2, f"{ESTIMATE} --model tiny --gpus 1,2", "'--gpus 1,2' 'autofit plan METHOD'"),
    "gpus_on_the_cpu": (2, "sft --model tiny --use_cpu --gpus 2", "--use_cpu --gpus '--gpu NAME --gpus N --simulate'"),
    "nodes_without_a_place": (2, f"{SIMULATED} --nodes 2", "'--nodes 2' --machine_rank --main_process_ip"),
    "other_machine_on_cpu": (2, f"{TRAIN} --use_cpu --nodes 2 --machine_rank 1 --main_process_ip here", "--use_cpu"),
    "link_unknown": (2, f"{PLAN} --gpus 2 --link nvlink", "nvlink nvlink4 ndr"),
    "sharding_unknown": (2, f"{PLAN} --gpus 2 --sharding zero4", "zero4 ddp fsdp2 hsdp zero3"),
    "sharding_of_old": (
        2,
        f"{PLAN} --gpus 2 --sharding fsdp1",
        "'--sharding fsdp2' 'accelerate to-fsdp2 --config_file'",
    ),
    "deepspeed_not_there": (2, f"{PLAN} --gpus 2 --deepspeed ds.json", "ds.json 'No such file' JSON"),
    "offload_of_no_zero": (2, f"{PLAN} --gpus 2 --offload_optimizer_device cpu", "--offload_optimizer_device zero2"),
    "sharding_of_one": (2, f"{PLAN} --sharding fsdp2", "'--sharding fsdp2' '--gpus 2'"),
    "hsdp_on_one_machine": (2, f"{PLAN} --gpus 4 --sharding hsdp", "hsdp '--nodes 2' fsdp2"),
    "offload_without_shards": (2, f"{PLAN} --gpus 4 --fsdp_offload_params", "--fsdp_offload_params '--sharding fsdp2'"),
    "batch_over_gpus": (40, f"{DATA} --gpus 3 --effective_batch_size 8", "'3 GPUs' '--effective_batch_size 6 or 9'"),
    "cards_to_train_on": (2, "sft --model tiny --gpu all --dataset data.jsonl", "'--gpu all' 'autofit plan METHOD'"),
    # -- models
    "model_no_config": (20, f"{ESTIMATE} --model no_config", "no_config config.json --model"),
    "model_is_a_file": (20, f"{ESTIMATE} --model tiny/config.json", "tiny/config.json '--model tiny'"),
    "model_cut_short": (23, f"{ESTIMATE} --model cut_short", "cut_short/config.json 'line 1 column 16'"),
    "model_no_type": (23, f"{ESTIMATE} --model no_type", "no_type/config.json model_type --model"),
    "model_wrong_size": (23, f"{ESTIMATE} --model wrong_size", "wrong_size/config.json hidden_size int str"),
    "model_made_up_type": (21, f"{ESTIMATE} --model made_up_type", "transformers gronkulator made_up_type"),
    "model_made_up_class": (21, f"{ESTIMATE} --model made_up_class", "transformers GronkForCausalLM made_up_class"),
    "model_no_class": (21, f"{ESTIMATE} --model no_class", "no_class architectures Qwen2ForCausalLM"),
    "model_bert": (21, f"{ESTIMATE} --model bert", "BertForMaskedLM SFT Qwen2ForCausalLM"),
    "reward_no_classifier": (
        21,
        f"plan reward --model mamba {CARD} --dataset pairs.jsonl --max_length 9",
        "mamba Qwen2",
    ),
    "quantized_twice": (21, f"{SHORT} --model quantized --load_in_8bit --use_peft", "bitsandbytes --load_in_8bit"),
    "quantized_full": (21, f"{SHORT} --model quantized", "--use_peft"),
    # -- files of data
    "data_no_file": (30, f"{PLAN} --dataset nowhere.jsonl", "nowhere.jsonl --dataset"),
    "data_no_path": (30, f"{PLAN} --dataset ./nowhere", "./nowhere --dataset"),
    "data_unreachable": (30, f"{PLAN} --dataset no-such-org/no-such-data", "no-such-org/no-such-data --dataset .jsonl"),
    "data_no_files": (30, f"{PLAN} --dataset no_files", "FILES/no_files --dataset .parquet"),
    "data_empty": (31, f"{PLAN} --dataset empty.jsonl", "empty.jsonl --dataset"),
    "data_in_folder": (32, f"{PLAN} --dataset broken", "broken/rows.jsonl 'line 1, column 1'"),
    "data_open_quote": (32, f"{PLAN} --dataset open_quote.csv", "open_quote.csv 'row 2'"),
    "data_no_split": (33, f"{DATA} --dataset_train_split nowhere", "nowhere --dataset_train_split train"),
    "data_no_test_split": (33, f"{DATA} --eval_strategy steps --eval_steps 5", "--dataset_test_split --eval_strategy"),
    # -- rows
    "data_other_text_field": (33, f"{PLAN} --dataset text.jsonl --dataset_text_field body", "text body"),
    "data_dpo_prompts": (33, f"plan dpo {TINY} --dataset prompts.jsonl", "DPOTrainer 'prompt, chosen, rejected'"),
    "data_ppo_text": (33, f"{JUDGED} --dataset text.jsonl", "PPOTrainer input_ids prompt"),
    "data_text_is_empty": (31, f"{PLAN} --dataset text_is_empty.jsonl", "text_is_empty.jsonl"),
    # -- rewards
    "no_data_to_train_on": (2, f"sft {TINY} --simulate", "--dataset trl-lib/Capybara --plan_only"),
    "reward_no_module": (2, f"{GRPO} --reward_funcs no_rewards.short", "no_rewards module.function"),
    "reward_not_callable": (2, f"{GRPO} --reward_funcs my_rewards.THRESHOLD", "my_rewards.THRESHOLD module.function"),
    "reward_import_fails": (2, f"{GRPO} --reward_funcs broken_rewards.a", "broken_rewards a_package_that_nobody_has"),
    "not_installed": (3, f"{LACKING} accuracy_reward", "math_verify clearml 'A plan alone'"),
    "five_at_once": (
        11,
        f"{LACKING} no --gpu t44 --model no_tokenizer --eval_on_start",
        "'5 problems' no_tokenizer split",
    ),
    # -- settings
    "end_token_unknown": (2, f"{DATA} --eos_token nope", "--eos_token nope <|im_end|>"),
    "half_base_trained": (2, f"{SHORT} --fp16 --dtype bfloat16", "--fp16 'dtype float32' '--bf16 true' --use_peft"),
    "flash_attention_on_cpu": (2, f"{TRAIN} --use_cpu {FLASH}", "flash_attention_2 --use_cpu sdpa"),
    "flash_attention_on_t4": (2, f"{SHORT} --gpu t4 {FLASH}", "flash_attention_2 8.0 7.5 sdpa"),
    "liger_unknown_model": (2, f"{SHORT} --model mamba --use_liger_kernel", "mamba qwen2 llama --use_liger_kernel"),
    "zero_on_the_cpu": (2, f"{TRAIN} --use_cpu --sharding zero3", "'--sharding zero3 with --use_cpu' --simulate"),
    "liger_simulated": (2, f"{SIMULATED} --use_liger_kernel", "--use_liger_kernel --plan_only"),
    "vllm_on_cpu": (2, f"{GRPO[5:]} --simulate --use_vllm --reward_funcs my_rewards.short", "--use_vllm --plan_only"),
    "simulated_and_not_trained": (2, f"{SIMULATED} --plan_only", "--simulate --plan_only"),
    "optimizer_not_rehearsed": (2, f"{SHORT} --optim adamw_torch_4bit", "adamw_torch_4bit adamw_8bit lion_8bit"),
    "optimizer_not_offloaded": (2, f"{SHORT} --optimizer_offload --optim adafactor", "adafactor adamw_torch sgd"),
    "optimizer_offloaded_ppo": (2, f"{JUDGED} --optimizer_offload", "--optimizer_offload PPO '--optim adamw_8bit'"),
    "optimizer_not_installed": (3, f"{SHORT} --optim lomo", "lomo_optim 'pip install lomo-optim'"),
    "images_for_text": (2, f"{SHORT} --max_pixels 1000", "--max_pixels qwen2 'Remove --max_pixels'"),
    "prompt_length_zero": (2, f"{GRPO} --prompt_length 0", "'--prompt_length 0' 1"),
    "ppo_max_completion_length": (2, f"{PPO} --max_completion_length 64", "grpo rloo --response_length"),
    "generation_batch": (40, f"{GRPO} --generation_batch_size 12", "12 '--generation_batch_size 8 or 16'"),
    "generation_contradicts": (2, f"{GRPO} --generation_batch_size 8 {PARTS}", "--steps_per_generation"),
    "mini_batches": (40, f"{JUDGED} --num_mini_batches 3", "'--effective_batch_size 6 or 9' '1, 2, 4 or 8'"),
    # -- output folders
    "output_below_a_file": (62, f"{SIMULATED} --output_dir data.jsonl/run", "FILES/data.jsonl --output_dir"),
    "output_holds_weights": (62, f"{SIMULATED} --output_dir judge", "model.safetensors --overwrite_output_dir"),
    "quickstart_folder_exists": (2, "quickstart --folder tiny", "tiny --folder"),
    "quickstart_unknown_flag": (2, "quickstart --foo", "--foo '[--folder FOLDER]'"),
    "quickstart_unwritable": (62, "quickstart --folder data.jsonl/run", "data.jsonl/run '--folder FOLDER'"),
    # -- plans, snapshots and exports
    "plan_folder_without": (42, "explain tiny", f"tiny plan.json {_WRITES_ONE}"),
    "plan_empty": (42, "explain empty_plan.json", f"empty_plan.json {_WRITES_ONE}"),
    "plan_of_another_version_in_a_run": (42, "explain old_fit.json", "autofit.plan/1 'autofit plan dpo --model MODEL'"),
    "plan_an_estimate": (42, "explain an_estimate.json", "an_estimate.json autofit.estimate/1"),
    "plan_not_given": (2, "explain", "'autofit explain plan.json' OUTPUT_FOLDER"),
    "plan_as_json": (2, "explain a.json --json", "--json JSON"),
    "plan_to_estimate": (2, "estimate sft --plan old_plan.json", "--plan 'autofit explain FILE'"),
    "plan_for_all_cards": (2, "plan sft --plan old_plan.json --gpu all", "--plan '--gpu all'"),
    "plan_is_stdin": (2, "sft --plan -", "--plan 'autofit explain -'"),
    "out_of_an_estimate": (2, "estimate sft --model tiny --gpu rtx3060 --out plan.json", "--out '--out FILE' --json"),
    "out_is_no_plan": (42, f"{PLAN} --out data.jsonl", "data.jsonl --out"),
    "out_is_stdout": (2, f"{PLAN} --out -", "--out --json"),
    "snapshot_is_a_folder": (62, "estimate sft --model not-there --snapshot tiny", "--snapshot"),
    "snapshot_of_a_cpu": (2, "estimate sft --model tiny --max_length 64 --use_cpu --snapshot x", "--gpu"),
    "snapshot_of_a_plan": (2, f"{PLAN} --snapshot=run.pickle", "'autofit estimate METHOD ... --snapshot FILE'"),
    "export_of_ppo": (2, "plan ppo --model none --export axolotl", "'--export axolotl does not write PPO yet'"),
    "export_as_json": (2, "plan sft --model none --export trl --json", "'--export trl' --json"),
    "export_and_dry_run": (2, "plan sft --model none --export trl --dry_run", "'--export trl' --dry_run"),
    "dry_run_for_all_cards": (2, "plan sft --model tiny --dry_run --gpu all", "'--gpu all'"),
    "accelerate_is_not_there": (2, f"{PLAN} --accelerate_config none.yaml", "none.yaml --accelerate_config"),
    "export_to_nobody": (2, "plan sft --model none --export torchtune", "trl accelerate axolotl llamafactory"),
    "export_of_an_estimate": (2, "estimate sft --model none --export trl", "'autofit plan METHOD ... --export TOOL'"),
    "out_folder_missing": (62, f"{PLAN} --out nowhere/plan.json", "nowhere/plan.json --out"),
    # -- limits
    "never_in_time": (
        43,
        f"plan sft --model tiny --gpu rtx3060 --max_length 16 {ONE_RUNG} --max_steps 10000000 --within 1min",
        "'--within 1 min' --max_steps rtx3060",
    ),
    # -- the environment
    "allocator_wrong_value": (2, f"{PLAN} --max_length 16", "expandable_segments:yes True PYTORCH_ALLOC_CONF"),
    "allocator_of_env": (2, f"plan sft --config env_allocator.yaml {CARD} --max_length 16", "cudaMallocAsync native"),
}

EARLY = (
    *("model_no_tokenizer", "data_no_template", "reward_no_function", "reward_model_no_tokenizer", "reward_no_module"),
    *("data_no_split", "data_no_test_split", "not_installed", "five_at_once"),
)
"""Mistakes that are told without a worker, so before TRL is imported. Others that are, too, are tested elsewhere."""

SHELL = {
    "launched_by_torchrun": ("LOCAL_RANK", "0"),
    "sharded_by_the_shell": ("ACCELERATE_USE_FSDP", "true"),
    "launched_by_mpirun": ("OMPI_COMM_WORLD_SIZE", "2"),
    "allocator_wrong_value": ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:yes"),
}
