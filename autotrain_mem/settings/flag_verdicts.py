"""Lists what a rehearsal does with each of TRL's flags, and why.

The flags are the fields of TRL's four dataclasses (``methods.configs: Configs``). If a new TRL adds one, it is in no
row, and ``tests/test_flag_verdicts.py`` fails and names it. Read its code, find out whether it changes memory or what
is trained, and add it to the matching row. The table alone suffices to refuse a flag for all methods, or to leave it
out of rehearsals; a flag that only some methods refuse also needs a line in the ``check`` of their modules.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Names what a rehearsal does with a flag."""

    REHEARSED = "rehearsed"
    """A rehearsal passes it to TRL's own trainer, so a plan includes its effect on memory."""
    COUNTED = "counted"
    """It determines the rows: their lengths are counted, and rehearsed rows have these lengths."""
    ONLY_FOR_REAL = "only for the real run"
    """A rehearsal leaves it out, or uses a value of its own."""
    HARMLESS = "harmless"
    """It changes no tensor's size, whether TRL's trainer gets it or not."""
    IDLE = "idle"
    """TRL accepts it but ignores it here: a plan warns."""
    REFUSED = "refused"
    """No plan is made with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagGroup:
    """Holds flags with the same verdict for the same reason."""

    verdict: Verdict
    why: str
    flags: str
    """The names of the flags, separated by spaces."""
    methods: tuple[str, ...] = ()
    """Methods to which the row applies; it overrides rows for all methods. Empty: all methods."""
    in_commands: bool = False
    """Whether the flags are idle only in commands: a script can pass the object that they concern."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.flags.split())


_NOT_SAMPLED = "only transformers' own generation loop is rehearsed: remove it"
_SHARDING = "--sharding fsdp2 divides a model among GPUs"
REFUSED: dict[str, str] = {
    "fsdp": f"{_SHARDING}; --accelerate_config takes a config of your own",
    "fsdp_config": f"{_SHARDING}; --accelerate_config takes a config of your own",
    "parallelism_config": f"{_SHARDING}, --sharding hsdp among machines; --cp_size and --sp_size divide rows",
    "model_init_kwargs": "--dtype and --attn_implementation are rehearsed",
    "use_transformers_paged": _NOT_SAMPLED,
    "use_transformers_continuous_batching": _NOT_SAMPLED,
    "auto_find_batch_size": "autofit finds the batch itself, and keeps the effective batch: remove it",
    # torch/.../flash_api.cpp: mha_bwd holds a float32 gradient of the queries for each split of the keys, and
    # transformers/trainer_utils.py: enable_full_determinism shrinks the workspaces of cuBLAS.
    "full_determinism": "deterministic kernels use different memory; --seed and --data_seed fix random numbers",
    # transformers/debug_utils.py: DebugUnderflowOverflow reads the extremes of every layer's output.
    "debug": "it copies every layer's output to examine it: remove it, and debug with trl METHOD itself",
    # Only trl/scripts/dpo.py: main reads it, so that DDP ignores buffers of bools.
    "ignore_bias_buffers": "--ddp_broadcast_buffers false keeps all buffers from being sent",
}
"""Flag -> what to do instead. If it were not refused, a plan would ignore it, or the rehearsal would fail."""
REFUSED_WHEN_OFF: dict[str, str] = {
    # transformers/trainer_utils.py: TrainerMemoryTracker.start
    "skip_memory_metrics": "transformers would reset the memory counters that autofit reads and reports: remove it"
}
"""Flag that is on by default -> what to do instead of turning it off, which is refused."""

_DPO, _KTO, _GRPO, _RLOO, _PPO, _REWARD = "dpo", "kto", "grpo", "rloo", "ppo", "reward"
_DISTILLATION, _ORPO, _CPO, _ONLINE_DPO, _GKD = "distillation", "orpo", "cpo", "online_dpo", "gkd"
_WITH_OWN_LOSS = (_REWARD, _DPO, _KTO, _ORPO, _CPO, _GRPO, _RLOO, _DISTILLATION, _ONLINE_DPO, _GKD, _PPO)
_ONLY, _IDLE = Verdict.ONLY_FOR_REAL, Verdict.IDLE

_FOR_ALL: Mapping[Verdict, Mapping[str, str]] = {
    Verdict.REFUSED: {
        "a rehearsal cannot follow it, or only TRL's own script uses it": " ".join((*REFUSED, *REFUSED_WHEN_OFF)),
    },
    Verdict.REHEARSED: {
        # -- how the model is loaded and adapted
        "how the model is loaded, quantized and adapted: from_pretrained, bitsandbytes and PEFT run unchanged": (
            "model_name_or_path model_revision trust_remote_code dtype attn_implementation load_in_8bit load_in_4bit "
            "bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage use_peft lora_r lora_alpha lora_dropout "
            "lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora "
            "reward_model_name_or_path reward_model_path disable_dropout cast_lm_head_to_fp32 "
            "teacher_model_name_or_path teacher_model_revision teacher_model_init_kwargs"
        ),
        # -- batches and lengths
        "sizes of batches, rows and completions, which determine the worst batch": (
            "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps max_length packing "
            "packing_strategy eval_packing padding_free pad_to_multiple_of truncation_mode train_sampling_strategy "
            "remove_unused_columns label_names accelerator_config num_generations num_generations_eval "
            "max_completion_length generation_batch_size steps_per_generation num_iterations response_length "
            "local_rollout_forward_batch_size num_mini_batches max_new_tokens"
        ),
        # -- what a step computes
        "what a step computes and keeps: precision, kernels, recomputation, offloading, the optimizer": (
            "bf16 fp16 use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha gradient_checkpointing "
            "gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs "
            "activation_offloading torch_empty_cache_steps optim optim_args optim_target_modules max_grad_norm "
            "average_tokens_across_devices label_smoothing_factor router_aux_loss_coef include_num_input_tokens_seen "
            "eval_accumulation_steps include_for_metrics metric_for_best_model"
        ),
        "which tensors a loss makes: TRL's own code computes it": (
            "loss_type loss_weights ld_alpha f_divergence_type label_smoothing use_weighting cpo_alpha alpha beta "
            "precompute_ref_log_probs sync_ref_model ref_model_sync_steps ref_model_mixup_alpha "
            "center_rewards_coefficient delta importance_sampling_level top_entropy_quantile entropy_coef "
            "use_adaptive_entropy off_policy_mask_threshold use_bias_correction_kl mask_truncated_completions "
            "multi_objective_aggregation scale_rewards reward_weights normalize_advantages reward_clip_range "
            "missing_eos_penalty whiten_rewards kl_estimator stop_token stop_token_id model_adapter_name "
            "ref_adapter_name"
        ),
        "how completions are sampled: transformers' loop runs its first and last step, and vLLM's share is counted": (
            "lmbda seq_kd temperature top_p top_k min_p repetition_penalty generation_kwargs cache_implementation "
            "ds3_gather_for_generation use_vllm vllm_mode vllm_enable_sleep_mode vllm_gpu_memory_utilization "
            "vllm_tensor_parallel_size vllm_importance_sampling_correction vllm_importance_sampling_mode "
            "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_cap"
        ),
        "how several GPUs work together: a rehearsal runs one of their processes": (
            "deepspeed ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph"
        ),
    },
    Verdict.COUNTED: {
        # -- rows
        "which rows are read, and how TRL converts them": (
            "dataset_name dataset_config dataset_train_split dataset_test_split datasets dataset_streaming streaming "
            "test_split_size chat_template_kwargs reward_funcs"
        ),
    },
    Verdict.ONLY_FOR_REAL: {
        "how texts become tokens: the data's tokens are counted, and a rehearsal's rows are already tokens": (
            "dataset_text_field dataset_kwargs dataset_num_proc completion_only_loss assistant_only_loss "
            "chat_template_path eos_token pad_token"
        ),
        # -- what a rehearsal replaces by its own
        "where a run begins and ends, and what it writes: a rehearsal has two steps, one evaluation if the job "
        "evaluates, one save, and a folder of its own": (
            "output_dir max_steps num_train_epochs total_episodes num_ppo_epochs eval_strategy num_sample_generations "
            "eval_steps eval_delay eval_on_start save_strategy load_best_model_at_end resume_from_checkpoint report_to "
            "disable_tqdm run_name push_to_hub hub_model_id log_completions log_completions_hub_repo"
        ),
        "it needs a GPU or other processes, and a rehearsal has neither": (
            "use_cpu tf32 ddp_backend torch_compile torch_compile_backend torch_compile_mode dataloader_num_workers "
            "dataloader_prefetch_factor dataloader_persistent_workers dataloader_multiprocessing_context"
        ),
        "it would take over the signals of the rehearsal's process": "enable_jit_checkpoint",
        "the reference model scores rows before training, without gradients: listed as not counted": (
            "precompute_ref_batch_size"
        ),
    },
    Verdict.HARMLESS: {
        "rates, factors and thresholds: numbers that tensors are multiplied by or compared with": (
            "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 adam_beta2 "
            "adam_epsilon desirable_weight undesirable_weight f_alpha_divergence_coef discopop_tau epsilon "
            "epsilon_high entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target kl_coef cliprange "
            "cliprange_value vf_coef gamma lam sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_k_neg "
            "vespo_lambda_pos vespo_lambda_neg simpo_gamma padding_value"
        ),
        "seeds, and the order in which rows come": (
            "seed data_seed shuffle_dataset ignore_data_skip dataloader_drop_last dataloader_in_order "
            "length_column_name restore_callback_states_from_checkpoint"
        ),
        "what is logged and reported, and how often": (
            "logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_on_each_node log_level "
            "log_level_replica project trackio_space_id trackio_bucket_id trackio_static_space_id log_multimodal "
            "log_unique_prompts num_completions_to_print"
        ),
        "which checkpoints are kept, and what is uploaded to the hub": (
            "greater_is_better save_steps save_only_model save_on_each_node save_total_limit hub_token "
            "hub_private_repo hub_strategy hub_always_push hub_revision"
        ),
        "where processes and servers are found, and how long they are waited for": (
            "ddp_timeout vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port"
        ),
        "how vLLM works within its share of the card": (
            "vllm_model_impl vllm_structured_outputs_regex vllm_max_model_length"
        ),
        "it affects host memory only": "dataloader_pin_memory",
        "it is always true": "do_train",
    },
    Verdict.IDLE: {
        "training does not use it; --eval_strategy steps evaluates": "do_eval do_predict",
        # transformers/trainer.py: evaluation_loop casts where `not self.is_in_train`
        "transformers casts the model only for evaluations after training, and autofit evaluates only during it": (
            "bf16_full_eval fp16_full_eval"
        ),
        # transformers/training_args.py: local_rank
        "launchers set it by the environment variable LOCAL_RANK": "local_rank",
        "it concerns tools or continuous batching, and a plan supports neither": (
            "max_tool_calling_iterations transformers_continuous_batching_config"
        ),
    },
}
"""Verdict -> why -> the flags to which it applies for this reason, for all methods."""

_FOR_SOME = (
    FlagGroup(
        verdict=_IDLE,
        why="it concerns the input of compute_metrics, and a command has no such function",
        flags="prediction_loss_only batch_eval_metrics eval_do_concat_batches eval_use_gather_object",
        in_commands=True,
    ),
    FlagGroup(
        verdict=Verdict.REFUSED,
        methods=(_ORPO, _CPO),  # orpo.py: check
        why="it is for encoder-decoder models, or for sampling during evaluation",
        flags="max_completion_length is_encoder_decoder generate_during_eval",
    ),
    FlagGroup(
        verdict=Verdict.REFUSED,
        methods=(_GKD,),  # gkd.py: check
        why="this trainer's own collator pads conversations, and only the last answer is trained on",
        flags="packing eval_packing padding_free assistant_only_loss",
    ),
    FlagGroup(
        verdict=_IDLE,
        # trl/experimental/gkd/gkd_trainer.py: __init__, compute_loss; ../utils.py: DataCollatorForChatML
        methods=(_GKD,),
        why="this trainer has its own loss and collator: rows are truncated at their start, and not preprocessed",
        flags="loss_type packing_strategy pad_to_multiple_of truncation_mode completion_only_loss dataset_text_field "
        "dataset_kwargs shuffle_dataset",
    ),
    FlagGroup(
        verdict=_IDLE,
        methods=(_ORPO, _CPO, _GKD),  # trl/experimental/orpo/orpo_trainer.py: __init__; gkd_trainer.py: __init__
        why="TRL turns it off, since its collator needs every column",
        flags="remove_unused_columns",
    ),
    FlagGroup(
        verdict=Verdict.REFUSED,
        methods=(_ONLINE_DPO,),  # online_dpo.py: check
        why="TRL's trainer fails with it, or the copying of weights to vLLM is not rehearsed",
        flags="use_vllm remove_unused_columns train_sampling_strategy eval_strategy eval_on_start vllm_mode "
        "vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_tensor_parallel_size",
    ),
    FlagGroup(
        verdict=_IDLE,
        methods=(_ONLINE_DPO,),
        why="it is not used: TRL's online DPO is never evaluated, and its batches are text",
        flags="eval_steps eval_delay eval_accumulation_steps include_for_metrics load_best_model_at_end "
        "per_device_eval_batch_size metric_for_best_model greater_is_better label_names average_tokens_across_devices "
        "include_num_input_tokens_seen length_column_name",
    ),
    FlagGroup(
        verdict=_ONLY,
        methods=(_GRPO, _RLOO),
        why="these metrics are named after reward functions, which a rehearsal replaces with stand-ins",
        flags="metric_for_best_model",
    ),
    FlagGroup(
        verdict=_IDLE,
        methods=_WITH_OWN_LOSS,  # their compute_loss never uses trainer.label_smoother
        why="this trainer's own loss does not smooth labels (DPO: --label_smoothing)",
        flags="label_smoothing_factor",
    ),
    FlagGroup(
        verdict=_IDLE,
        methods=(_GRPO, _RLOO, _DISTILLATION),  # trl/trainer/grpo_trainer.py: _get_train_sampler
        why="this trainer has its own sampler of prompts; --shuffle_dataset sets whether it shuffles",
        flags="train_sampling_strategy length_column_name",
    ),
    FlagGroup(
        verdict=_IDLE,
        methods=(_PPO,),  # trl/experimental/ppo/ppo_trainer.py: train is a loop of its own
        why="TRL's PPO has its own loop, which ignores it",
        flags="train_sampling_strategy length_column_name neftune_noise_alpha torch_empty_cache_steps torch_compile "
        "torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config load_best_model_at_end "
        "metric_for_best_model greater_is_better eval_steps eval_delay eval_on_start eval_accumulation_steps "
        "include_for_metrics average_tokens_across_devices include_num_input_tokens_seen remove_unused_columns "
        "label_names accelerator_config use_cache dataloader_num_workers dataloader_prefetch_factor "
        "dataloader_persistent_workers dataloader_multiprocessing_context dataloader_in_order dataloader_drop_last "
        "dataloader_pin_memory",
    ),
    FlagGroup(
        verdict=_IDLE,
        methods=(_PPO,),  # ppo_trainer.py: __init__ computes them
        why="TRL computes it from --per_device_train_batch_size, --gradient_accumulation_steps and the processes",
        flags="world_size num_total_batches micro_batch_size local_batch_size batch_size local_mini_batch_size "
        "mini_batch_size",
    ),
    FlagGroup(
        verdict=_IDLE,
        methods=(_PPO,),  # only TRL's example script reads it
        why="the policy is --model",
        flags="sft_model_path",
    ),
)

GROUPS: tuple[FlagGroup, ...] = (
    *_FOR_SOME,
    *(
        FlagGroup(verdict=verdict, why=why, flags=flags)
        for verdict, rows in _FOR_ALL.items()
        for why, flags in rows.items()
    ),
)
"""Every flag of TRL 1.12 to 1.16; rows for some methods precede those for all."""


@functools.cache
def only_for_real(method: str) -> frozenset[str]:
    """Returns the flags that a rehearsal of this method leaves out."""
    rows = (group for group in GROUPS if not group.methods or method in group.methods)
    return frozenset(name for group in rows if group.verdict is Verdict.ONLY_FOR_REAL for name in group.names)


def group_of(method: str, name: str) -> FlagGroup | None:
    """Returns the row of one of TRL's flags; None if it has no verdict yet.

    >>> str(group_of("dpo", "label_smoothing_factor").verdict), str(group_of("sft", "label_smoothing_factor").verdict)
    ('idle', 'rehearsed')
    """
    return next((group for group in GROUPS if name in group.names and method in (group.methods or (method,))), None)
