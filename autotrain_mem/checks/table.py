"""Lists all checks, grouped by the point of a run at which they run, in the order in which they report problems.

To add a check, write a function that yields its problems (``types.findings``), and add it to a list here.
"""

from autotrain_mem.checks import (
    adapters,
    compatibility,
    flag_checks,
    model_files,
    preflight_checks,
    sharding,
    trl_arguments,
)
from autotrain_mem.checks.flag_checks import Flags
from autotrain_mem.checks.model_files import ModelOnCard
from autotrain_mem.checks.preflight_checks import Setup
from autotrain_mem.types.findings import Check

FLAGS: tuple[Check[Flags], ...] = (
    flag_checks.exclusive,
    flag_checks.device,
    flag_checks.levers_of_a_gpu,
    flag_checks.precision,
    flag_checks.quantization,
    flag_checks.prompt_length,
    flag_checks.row_limit,
    flag_checks.forbidden_levers,
    flag_checks.offloaded_optimizer,
    sharding.arguments,
    sharding.optimizer_on_host,
    sharding.on_the_cpu,
    sharding.method,
    sharding.shared_tokens,
    flag_checks.padding_free,
    flag_checks.rows,
    flag_checks.generation_cache,
    flag_checks.compiled_graphs,
    flag_checks.optimizer,
    flag_checks.arguments,
    trl_arguments.data_workers,
    trl_arguments.best_model,
    trl_arguments.kept_inputs,
    trl_arguments.accelerator,
    flag_checks.effective_batch,
)
"""Refuses flags that contradict each other, and those that cannot be planned with."""

TRL_ARGUMENTS: tuple[Check[Flags], ...] = (
    trl_arguments.accepted_by_trl,
    trl_arguments.accepted_by_peft,
    trl_arguments.tracker_names,
    trl_arguments.label_smoothing,
    trl_arguments.evaluation_of_command,
)
"""Refuses what TRL's dataclasses refuse, and arguments that would make a run fail when it starts."""

MODEL: tuple[Check[ModelOnCard], ...] = (
    model_files.reward_model,
    model_files.teacher_model,
    compatibility.quantization,
    compatibility.attention,
    compatibility.images,
    sharding.shared_attention,
    compatibility.liger,
)
"""Refuses arguments that do not work with the model, the card, or the installed TRL."""

PREFLIGHT: tuple[Check[Setup], ...] = (
    preflight_checks.emulated_bf16,
    preflight_checks.tf32,
    preflight_checks.idle,
    preflight_checks.flash_attention_package,
    preflight_checks.compiled_optimizer,
    preflight_checks.data,
    preflight_checks.special_tokens,
    preflight_checks.padding_of_method,
    preflight_checks.vocabulary,
    preflight_checks.chat_template,
    adapters.unmatched_targets,
    adapters.adapted_experts,
    adapters.router_loss,
)
"""Finds problems of model, tokenizer and data before anything is rehearsed."""
