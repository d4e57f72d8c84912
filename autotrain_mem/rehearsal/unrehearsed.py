"""What a rehearsal cannot tell yet: arguments that are refused, since their memory would be mispredicted, and those
whose share is only named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotrain_mem.errors import UsageError

_ONE_GPU = "plans are for one GPU so far: leave it away"
_QUANTIZED = "train LoRA on a bfloat16 base: --use_peft --dtype bfloat16"

REFUSED = {
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "use_liger_kernel": "TRL's own chunked loss saves the same logits: --loss_type chunked_nll",
    "activation_offloading": "recompute instead: --gradient_checkpointing true",
    "fp16": "--bf16 true, or --bf16 false to compute in float32",
    "deepspeed": _ONE_GPU,
    "fsdp": _ONE_GPU,
    "fsdp_config": _ONE_GPU,
    "parallelism_config": _ONE_GPU,
    "model_init_kwargs": "--dtype and --attn_implementation are rehearsed",
    "auto_find_batch_size": "autofit finds the batch itself, and keeps the effective batch: leave it away",
}
"""Argument -> what to do instead. Each would be planned for as if it were not there, or end the rehearsal."""


def refuse(given: Mapping[str, Any]) -> None:
    """Raise UsageError, once, for all arguments that a rehearsal would mispredict."""
    refused = [name for name in REFUSED if given.get(name)]
    if given.get("padding_free") and not given.get("packing"):
        raise UsageError(
            "--padding_free without --packing trains on rows that TRL does not truncate, which no plan allows for yet.",
            hint="Give --packing true, which is padding-free with its default strategy.",
        )
    if "ademamix" in str(given.get("optim", "")) and str(given["optim"]).startswith("paged_"):
        raise UsageError(
            f"Not rehearsed yet, so that no plan can be made with it: --optim {given['optim']}.",
            hint="--optim ademamix_8bit and --optim paged_adamw_8bit are rehearsed.",
        )
    if refused:
        raise UsageError(
            f"Not rehearsed yet, so that no plan can be made with {', '.join(f'--{name}' for name in refused)}.",
            hint="\n".join(f"--{name}  {REFUSED[name]}" for name in refused),
        )


def not_counted(given: Mapping[str, Any]) -> tuple[str, ...]:
    """What these arguments add to a run that its estimate leaves out, in sentences for the estimate."""
    facts = []
    if str(given.get("eval_strategy", "no")) not in ("no", "IntervalStrategy.NO"):
        facts.append(
            "evaluation is not rehearsed yet: its peak may be higher where --per_device_eval_batch_size is larger than "
            "the micro-batch, or rows of the test split are longer"
        )
    if str(given.get("optim", "")).startswith("paged_"):
        facts.append(
            "large state of a paged optimizer: it lies in CUDA's managed memory, outside torch's allocator, and moves "
            "to the host when the card is full"
        )
    if given.get("chat_template_path"):
        facts.append("tokens that the chat template adds to the embeddings: a few rows of the vocabulary")
    if given.get("torch_compile"):
        facts.append("torch_compile is rehearsed uncompiled, which mostly needs more")
    return tuple(facts)
