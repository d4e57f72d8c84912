"""Keys that other tools take, read in their sources: facts, by which the exports are held."""

from __future__ import annotations

AXOLOTL = frozenset(
    {
        *("accelerator_config", "activation_offloading", "adam_beta1", "adam_beta2", "adam_beta3", "adam_epsilon"),
        *("adam_epsilon2", "adapter", "added_tokens_overrides", "attn_implementation", "auto_find_batch_size"),
        *("auto_resume_from_checkpoints", "axolotl_config_path", "base_model", "base_model_config"),
        *("batch_flattening", "batch_size", "bench_dataset", "bench_split", "bf16", "bfloat16"),
        *("bnb_config_kwargs", "center_rewards_coefficient", "chat_template", "chat_template_jinja"),
        *("chat_template_kwargs", "chunked_cross_entropy", "chunked_cross_entropy_num_chunks", "cls_model_config"),
        *("context_parallel_size", "cosine_constant_lr_ratio", "cosine_min_lr_ratio", "cpo_alpha"),
        *("curriculum_sampling", "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
        *("dataloader_prefetch_factor", "dataset_exact_deduplication", "dataset_keep_in_memory"),
        *("dataset_num_proc", "dataset_prepared_path", "dataset_processes", "dataset_shard_idx"),
        *("dataset_shard_num", "datasets", "ddp", "ddp_broadcast_buffers", "ddp_bucket_cap_mb"),
        *("ddp_find_unused_parameters", "ddp_timeout", "deepcompile", "deepspeed", "default_system_message"),
        *("device", "device_map", "dion_lr", "dion_momentum", "dion_rank_fraction", "dion_rank_multiple_of"),
        *("do_bench_eval", "do_causal_lm_eval", "dp_replicate_size", "dp_shard_size", "dpo_label_smoothing"),
        *("dpo_loss_type", "dpo_loss_weights", "dpo_padding_free", "dpo_use_liger_kernel", "dpo_use_weighting"),
        *("dynamic_checkpoint", "eaft_alpha", "eaft_k", "eager_attention", "early_stopping_patience", "ebft"),
        *("embedding_lr", "embedding_lr_scale", "embeddings_skip_upcast", "eot_tokens", "eval_batch_size"),
        *("eval_causal_lm_metrics", "eval_sample_packing", "eval_sequence_len", "eval_steps", "eval_strategy"),
        *("evals_per_epoch", "excess_length_strategy", "experimental_skip_move_to_device"),
        *("experts_implementation", "fix_untrained_tokens", "flash_attention", "flash_attn_cross_entropy"),
        *("flash_attn_d512", "flash_attn_fuse_mlp", "flash_optimum", "flex_attention", "flex_attn_compile_kwargs"),
        *("float16", "float32", "fp16", "fp32_norm_classes", "fp32_norms", "fp8"),
        *("fp8_enable_fsdp_float8_all_gather", "freeze_mm_modules", "fsdp", "fsdp_config"),
        *("fsdp_final_state_dict_type", "fsdp_version", "fused_attn_kernel", "gc_collect_steps", "gc_steps"),
        *("gemma4_hybrid_attn_impl", "generate_samples", "generation_do_sample", "generation_max_new_tokens"),
        *("generation_prompt_ratio", "generation_temperature", "generation_top_k", "generation_top_p", "gptq"),
        *("gpu_memory_limit", "gradient_accumulation_steps", "gradient_checkpointing"),
        *("gradient_checkpointing_kwargs", "greater_is_better", "group_by_length", "heads_k_stride"),
        *("hf_use_auth_token", "hub_model_id", "hub_revision", "hub_strategy", "include_tkps"),
        *("include_tokens_per_second", "is_falcon_derived_model", "is_llama_derived_model"),
        *("is_mistral_derived_model", "is_preprocess", "is_qwen_derived_model", "kto_desirable_weight"),
        *("kto_undesirable_weight", "large_head_attention", "layer_offloading", "learning_rate"),
        *("liger_cross_entropy", "liger_fused_linear_cross_entropy", "liger_glu_activation", "liger_layer_norm"),
        *("liger_rms_norm", "liger_rms_norm_gated", "liger_rope", "liger_swiglu", "liger_use_token_scaling"),
        *("llama4_linearized_experts", "load_best_model_at_end", "load_in_4bit", "load_in_8bit", "local_rank"),
        *("logging_steps", "lora_alpha", "lora_alpha_pattern", "lora_dropout", "lora_embedding_kernel"),
        *("lora_fan_in_fan_out", "lora_mlp_kernel", "lora_model_dir", "lora_modules_to_save", "lora_o_kernel"),
        *("lora_on_cpu", "lora_qkv_kernel", "lora_r", "lora_rank_pattern", "lora_target_linear"),
        *("lora_target_modules", "lora_target_parameters", "loraplus_lr_embedding", "loraplus_lr_ratio"),
        *("loss_watchdog_patience", "loss_watchdog_threshold", "low_cpu_mem_usage", "lr_div_factor", "lr_groups"),
        *("lr_quadratic_warmup", "lr_scheduler", "lr_scheduler_kwargs", "max_grad_norm", "max_memory"),
        *("max_prompt_len", "max_steps", "mean_resizing_embeddings", "merge_lora", "merge_method"),
        *("metric_for_best_model", "micro_batch_size", "min_sample_len", "model_quantization_config"),
        *("model_quantization_config_kwargs", "model_revision", "model_type", "multipack_real_batches"),
        *("neftune_noise_alpha", "num_dataset_shards_to_save", "num_epochs", "num_generation_samples"),
        *("num_labels", "optim_args", "optim_target_modules", "optimizer", "orpo_alpha", "output_dir"),
        *("pad_to_multiple_of", "pad_to_sequence_len", "peft", "peft_autocast_adapter_dtype"),
        *("peft_ensure_weight_tying", "peft_init_lora_weights", "peft_layer_replication", "peft_layers_pattern"),
        *("peft_layers_to_transform", "peft_trainable_token_indices", "peft_use_dora", "peft_use_rslora"),
        *("plugins", "pose_max_context_len", "pose_num_chunks", "pose_split_on_token_ids"),
        *("precompute_ref_log_probs", "preprocess_iterable", "pretrain_multipack_attn"),
        *("pretrain_multipack_buffer_size", "pretraining_dataset", "pretraining_sample_concatenation"),
        *("process_reward_model", "processor_kwargs", "processor_type", "profiler_steps", "profiler_steps_start"),
        *("push_dataset_to_hub", "qat", "qgalore_cos_threshold", "qgalore_gamma_proj", "qgalore_proj_bits"),
        *("qgalore_proj_group_size", "qgalore_proj_quant", "qgalore_proj_type", "qgalore_queue_size"),
        *("qgalore_rank", "qgalore_scale", "qgalore_update_proj_gap", "qlora_sharded_model_loading"),
        *("quantization", "quantize_moe_experts", "reinit_weights", "remove_unused_columns"),
        *("resize_token_embeddings_to_32x", "resume_from_checkpoint", "reward_model", "ring_attn_func", "rl"),
        *("rl_beta", "sage_attention", "sample_packing", "sample_packing_bin_size", "sample_packing_eff_est"),
        *("sample_packing_group_size", "sample_packing_mp_start_method", "sample_packing_sequentially"),
        *("save_first_step", "save_only_model", "save_safetensors", "save_steps", "save_strategy"),
        *("save_total_limit", "saves_per_epoch", "scaling_softmax", "scaling_softmax_bias"),
        *("scaling_softmax_factor", "sdp_attention", "sdpa_varlen", "seed", "selective_checkpointing"),
        *("sequence_len", "sequence_parallel_degree", "shrink_embeddings", "shuffle_before_merging_datasets"),
        *("shuffle_merged_datasets", "simpo_gamma", "skip_prepare_dataset", "special_tokens", "streaming"),
        *("streaming_multipack_buffer_size", "strict", "tensor_parallel_size", "test_datasets", "tf32"),
        *("tiled_mlp", "tiled_mlp_num_shards", "tiled_mlp_use_original_mlp", "tokenizer_config"),
        *("tokenizer_legacy", "tokenizer_save_jinja_files", "tokenizer_type", "tokenizer_use_fast"),
        *("tokenizer_use_mistral_common", "tokens", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
        *("torch_compile_options", "torch_empty_cache_steps", "torchdistx_path", "total_num_tokens"),
        *("total_supervised_tokens", "train_on_inputs", "trainer_cls", "trl", "trust_remote_code"),
        *("unfrozen_parameters", "use_comet", "use_eaft", "use_kernels", "use_mlflow", "use_onebitllms"),
        *("use_pose", "use_tensorboard", "use_trackio", "use_wandb", "val_set_size", "vllm", "wandb_name"),
        *("warmup_ratio", "warmup_steps", "weight_decay", "world_size", "xformers_attention"),
    }
)
"""axolotl-ai-cloud/axolotl 067b021, ``src/axolotl/utils/schemas``: AxolotlInputConfig (config.py), ModelInputConfig and
ModelOutputConfig (model.py), LoraConfig (peft.py), HyperparametersConfig (training.py), model_type and model_revision
(deprecated.py: RemappedParameters), reporters (integrations.py); ``integrations/liger/args.py: LigerArgs``."""

AXOLOTL_DATASET = frozenset(
    {
        *("chat_template", "chat_template_jinja", "conversation", "data_files", "drop_system_message", "ds_type"),
        *("field", "field_chosen", "field_human", "field_messages", "field_model", "field_rejected"),
        *("field_thinking", "field_tools", "input_format", "input_transform", "logprobs_field"),
        *("message_field_content", "message_field_role", "message_field_training", "message_field_training_detail"),
        *("message_property_mappings", "name", "path", "preprocess_shards", "revision", "roles", "roles_to_train"),
        *("shards", "shards_idx", "split", "split_thinking", "temperature", "template_thinking_key"),
        *("train_on_eos", "train_on_eot", "trust_remote_code", "type"),
    }
)
"""``datasets.py: SFTDataset, DPODataset``."""

AXOLOTL_TRL = frozenset(
    {
        *("async_prefetch", "beta", "chat_template_kwargs", "epsilon", "epsilon_high", "generation_batch_size"),
        *("generation_kwargs", "importance_sampling_level", "log_completions", "loss_type"),
        *("mask_truncated_completions", "max_completion_length", "min_p", "multi_objective_aggregation"),
        *("num_completions_to_print", "num_generations", "num_iterations", "off_policy_mask_threshold"),
        *("prefetch_depth", "ref_model_mixup_alpha", "ref_model_sync_steps", "repetition_penalty"),
        *("replay_buffer_size", "replay_recompute_logps", "reroll_max_groups", "reroll_start_fraction"),
        *("reward_funcs", "reward_num_workers", "reward_weights", "rollout_func", "scale_rewards"),
        *("skip_zero_advantage_batches", "streaming_min_groups", "streaming_partial_batch", "sync_ref_model"),
        *("temperature", "top_k", "top_p", "use_bias_correction_kl", "use_data_producer", "use_liger_loss"),
        *("use_vllm", "vllm_enable_sleep_mode", "vllm_guided_decoding_regex", "vllm_importance_sampling_cap"),
        *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_lora_sync", "vllm_mode"),
        *("vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_sync_interval"),
    }
)
"""``trl.py: TRLConfig``."""

AXOLOTL_VLLM = frozenset(
    {
        *("data_parallel_size", "device", "dtype", "enable_prefix_caching", "enable_reasoning", "enforce_eager"),
        *("gpu_memory_utilization", "host", "max_model_len", "port", "reasoning_parser", "serve_module"),
        *("tensor_parallel_size", "worker_extension_cls"),
    }
)
"""``vllm.py: VllmConfig``."""

LLAMAFACTORY = frozenset(
    {
        *("adapter_folder", "adapter_name_or_path", "add_special_tokens", "add_tokens", "additional_target"),
        *("asft_alpha", "buffer_size", "cache_dir", "compute_accuracy", "create_new_adapter", "cutoff_len"),
        *("data_shared_file_system", "dataset", "dataset_dir", "default_system", "disable_gradient_checkpointing"),
        *("disable_shuffling", "do_sample", "double_quantization", "dpo_label_smoothing", "eaft_alpha"),
        *("early_stopping_steps", "enable_liger_kernel", "enable_thinking", "eval_dataset", "eval_num_beams"),
        *("eval_on_each_dataset", "finetuning_type", "flash_attn", "freeze_language_model"),
        *("freeze_multi_modal_projector", "freeze_vision_tower", "hf_hub_token", "hyper_parallel_cp_size"),
        *("ignore_pad_token_for_loss", "include_effective_tokens_per_second", "infer_backend", "infer_dtype"),
        *("init_special_tokens", "interleave_probs", "kto_chosen_weight", "kto_rejected_weight", "ld_alpha"),
        *("length_penalty", "lora_alpha", "lora_dropout", "lora_rank", "lora_target", "loraplus_lr_embedding"),
        *("loraplus_lr_ratio", "low_cpu_mem_usage", "mask_history", "max_length", "max_new_tokens", "max_samples"),
        *("media_dir", "mix_strategy", "mixture_of_depths", "model_name_or_path", "model_revision"),
        *("moe_aux_loss_coef", "ms_hub_token", "neat_packing", "new_special_tokens_config", "num_beams"),
        *("offload_folder", "om_hub_token", "overwrite_cache", "packing", "pissa_convert", "pissa_init"),
        *("pissa_iter", "plot_loss", "ppo_buffer_size", "ppo_epochs", "ppo_score_norm", "ppo_target"),
        *("ppo_whiten_rewards", "pref_bco_weight", "pref_beta", "pref_ftx", "pref_loss"),
        *("preprocessing_batch_size", "preprocessing_num_workers", "preserve_thinking", "print_param_status"),
        *("pure_bf16", "quantization_bit", "quantization_device_map", "quantization_method", "quantization_type"),
        *("ref_model", "ref_model_adapters", "ref_model_quantization_bit", "repetition_penalty", "resize_vocab"),
        *("reward_model", "reward_model_adapters", "reward_model_quantization_bit", "reward_model_type"),
        *("rope_scaling", "shift_attn", "simpo_gamma", "skip_special_tokens", "split_special_tokens", "stage"),
        *("streaming", "temperature", "template", "tokenized_path", "tool_format", "top_k", "top_p"),
        *("train_from_scratch", "train_on_prompt", "trust_remote_code", "upcast_layernorm", "upcast_lmhead_output"),
        *("use_adam_mini", "use_asft_loss", "use_dft_loss", "use_dora", "use_eaft_loss", "use_fast_tokenizer"),
        *("use_hyper_parallel", "use_kv_cache", "use_llama_pro", "use_mca", "use_megatron_bridge", "use_muon"),
        *("use_reentrant_gc", "use_rslora", "use_unsloth", "use_unsloth_gc", "use_v1_kernels", "val_size"),
    }
)
"""hiyouga/LLaMA-Factory ff6d4d1, ``src/llamafactory/hparams``: BaseModelArguments, QuantizationArguments,
DataArguments, LoraArguments, RLHFArguments and FinetuningArguments (finetuning_args.py), GeneratingArguments; beside
them all of transformers' TrainingArguments (training_args.py)."""
