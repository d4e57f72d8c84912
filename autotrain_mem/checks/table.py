"""Every check, in the order in which a user reads what is wrong: what is refused, and at which point of a run.

To add a check, write a function that yields its problems (``checks.collect``), and give it a line here.
"""

from __future__ import annotations

from autotrain_mem.checks import (
    compatibility,
    experts,
    flags,
    idle_flags,
    late_failures,
    lora_targets,
    model,
    preflight,
    sharding,
    tokenizer,
)
from autotrain_mem.checks.collect import Check
from autotrain_mem.checks.flags import Flags
from autotrain_mem.checks.model import ModelOnCard
from autotrain_mem.checks.preflight import Setup

FLAGS: tuple[Check[Flags], ...] = (
    flags.device,
    flags.levers_of_a_gpu,
    flags.precision,
    flags.quantization,
    flags.adapter,
    flags.generations,
    flags.prompt_length,
    flags.max_length,
    flags.forbidden_levers,
    flags.offloaded_optimizer,
    flags.vllm,
    sharding.arguments,
    sharding.optimizer_on_host,
    sharding.on_the_cpu,
    sharding.method,
    sharding.shared_tokens,
    flags.padding_free,
    flags.rows,
    flags.generation_cache,
    flags.compiled_graphs,
    flags.optimizer,
    flags.arguments,
    late_failures.data_workers,
    late_failures.best_model,
    late_failures.kept_inputs,
    late_failures.accelerator,
    flags.effective_batch,
)
"""What the user's words say against each other, and what no plan can be made with."""

TRL_ARGUMENTS: tuple[Check[Flags], ...] = (
    compatibility.accepted_by_trl,
    compatibility.accepted_by_peft,
    compatibility.tracker_names,
    compatibility.checkpoint_to_resume,
    compatibility.label_smoothing,
    late_failures.evaluation_of_command,
)
"""What TRL's dataclasses refuse, and what a run would end with when it starts, by its arguments alone."""

MODEL: tuple[Check[ModelOnCard], ...] = (
    model.reward_model,
    model.teacher_model,
    compatibility.quantization,
    compatibility.bitsandbytes_on_card,
    compatibility.attention,
    compatibility.images,
    sharding.shared_attention,
    compatibility.liger,
)
"""What cannot go together: a job's arguments with its model, with the card, and with the installed TRL."""

TRAINING: tuple[Check[Flags], ...] = (
    compatibility.ready_to_train,
    compatibility.reward_tokenizer,
    compatibility.packages,
    compatibility.trackers,
)
"""What training needs where a plan can be made without."""

PREFLIGHT: tuple[Check[Setup], ...] = (
    preflight.emulated_bf16,
    preflight.tf32,
    idle_flags.idle,
    preflight.flash_attention_package,
    preflight.compiled_optimizer,
    preflight.data,
    tokenizer.special_tokens,
    tokenizer.padding_of_method,
    tokenizer.vocabulary,
    tokenizer.chat_template,
    lora_targets.unmatched_targets,
    experts.adapted_experts,
    experts.router_loss,
)
"""What can be known to go wrong with model, tokenizer and data before anything is rehearsed."""
