"""Axolotl's GRPO: its ``trl:`` and ``vllm:`` blocks, and rewards.

``src/axolotl/utils/schemas/trl.py: TRLConfig``, ``vllm.py: VllmConfig``; only what ``core/trainers/grpo/__init__.py:
GRPOStrategy.set_training_args_kwargs`` hands on to TRL's trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotrain_mem.exports.draft import Draft

SAME = (
    *("num_generations", "generation_batch_size", "max_completion_length", "beta", "temperature", "top_p", "top_k"),
    *("min_p", "repetition_penalty", "num_iterations", "epsilon", "epsilon_high", "importance_sampling_level"),
    *("reward_weights", "loss_type", "mask_truncated_completions", "sync_ref_model", "ref_model_mixup_alpha"),
    *("ref_model_sync_steps", "log_completions", "num_completions_to_print", "multi_objective_aggregation"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_cap"),
    *("off_policy_mask_threshold", "use_bias_correction_kl", "use_vllm", "vllm_mode", "vllm_enable_sleep_mode"),
    *("vllm_server_host", "vllm_server_port"),
)
VLLM = {
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_tensor_parallel_size": "tensor_parallel_size",
    "vllm_max_model_length": "max_model_len",
}
VLLM_DEFAULTS: Mapping[str, Any] = {"vllm_mode": "colocate", "vllm_enable_sleep_mode": False}
VLLM_SHARE: Mapping[str, Any] = {"vllm_gpu_memory_utilization": 0.3, "vllm_tensor_parallel_size": 1}
"""TRL's defaults (``trl/trainer/grpo_config.py: GRPOConfig``); Axolotl's engine would take 0.9 of the card."""

_BUILT_IN = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""What ``trl/scripts/grpo.py`` knows by a short name, of ``trl.rewards``; one more of them takes arguments."""
_OWN_ARGUMENTS = "get_soft_overlong_punishment"


def add_grpo(draft: Draft) -> None:
    """Adds the blocks; what is not set keeps TRL's default, since the trainer is TRL's own."""
    settings = draft.settings
    draft.answered.update((*SAME, *VLLM))
    block: dict[str, Any] = {name: settings[name] for name in SAME if settings.get(name) is not None}
    block["beta"] = draft.get("beta")
    judge = settings.get("reward_model_name_or_path")
    functions = [*([judge] if judge else []), *(settings.get("reward_funcs") or ())]
    if _OWN_ARGUMENTS in functions:
        draft.notes.append(
            f"reward_funcs {_OWN_ARGUMENTS}: TRL's script gives it arguments; write a function of your own for it"
        )
    elif not functions:
        draft.notes.append("reward_funcs: none was given to plan with, and Axolotl needs one to train")
    if functions:
        names = {name: f"trl.rewards.{name}" for name in _BUILT_IN}
        block["reward_funcs"] = [names.get(name, name) for name in functions if name != _OWN_ARGUMENTS]
        draft.answered.update(("reward_funcs", "reward_model_name_or_path"))
    if settings.get("scale_rewards") in (True, False, "group", "none"):
        block["scale_rewards"] = draft.get("scale_rewards") in (True, "group")
    if (liger := draft.get("use_liger_kernel")) is not None:
        block["use_liger_loss"] = liger
    if (timeout := draft.get("vllm_server_timeout")) is not None:
        block["vllm_server_timeout"] = int(timeout)
    vllm = {VLLM[name]: settings[name] for name in VLLM if settings.get(name) is not None}
    if settings.get("use_vllm"):
        block, vllm = {**VLLM_DEFAULTS, **block}, {**{VLLM[name]: VLLM_SHARE[name] for name in VLLM_SHARE}, **vllm}
    draft.keys |= {"trl": block, **({"vllm": vllm} if vllm else {})}
