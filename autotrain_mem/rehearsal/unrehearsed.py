"""What a rehearsal cannot tell yet: arguments that are refused, since their memory would be mispredicted, and those
whose share is only named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autotrain_mem.errors import UsageError
from autotrain_mem.rehearsal.lens.bitsandbytes import EIGHT_BIT_NOT_COUNTED, FOUR_BIT_NOT_COUNTED
from autotrain_mem.rehearsal.lens.host import NOT_COUNTED as OFFLOADING_NOT_COUNTED
from autotrain_mem.spec import Job, Knobs
from autotrain_mem.trainers.host_optimizer import SUPPORTED as OFFLOADED

_NOT_SAMPLED = "generation is rehearsed as transformers' own loop: leave it away"
_ONE_GPU = "plans are for one GPU so far: leave it away"
REFUSED = {
    "deepspeed": _ONE_GPU,
    "fsdp": _ONE_GPU,
    "fsdp_config": _ONE_GPU,
    "parallelism_config": _ONE_GPU,
    "model_init_kwargs": "--dtype and --attn_implementation are rehearsed",
    "use_transformers_paged": _NOT_SAMPLED,
    "use_transformers_continuous_batching": _NOT_SAMPLED,
    "auto_find_batch_size": "autofit finds the batch itself, and keeps the effective batch: leave it away",
}
"""Argument -> what to do instead. Each would be planned for as if it were not there, or end the rehearsal."""


def refuse(method: str, given: Mapping[str, Any]) -> None:
    """Raise UsageError, once, for all arguments that a rehearsal would mispredict or a run could not use."""
    problems = [
        *_quantization(given),
        *_half_precision(given),
        *_vllm(given),
        *_padding_free(given),
        *_optimizer(method, given),
        *_unrehearsed(given),
    ]
    if problems:
        raise UsageError(
            " ".join(message for message, _ in problems), hint="\n".join(dict.fromkeys(hint for _, hint in problems))
        )


Problems = Iterator[tuple[str, str]]
"""What is wrong, and what to do about it."""


def _unrehearsed(given: Mapping[str, Any]) -> Problems:
    refused = [name for name in REFUSED if given.get(name)]
    if refused:
        yield (
            f"Not rehearsed yet, so that no plan can be made with {', '.join(f'--{name}' for name in refused)}.",
            "\n".join(f"--{name}  {REFUSED[name]}" for name in refused),
        )


def _padding_free(given: Mapping[str, Any]) -> Problems:
    if given.get("padding_free") and not given.get("packing"):
        yield (
            "--padding_free without --packing trains on rows that TRL does not truncate, which no plan allows for yet.",
            "Give --packing true, which is padding-free with its default strategy.",
        )


def _quantization(given: Mapping[str, Any]) -> Problems:
    """Weights of 4 or 8 bits cannot take a gradient step: they are trained with an adapter, or not at all."""
    quantized = [name for name in ("load_in_4bit", "load_in_8bit") if given.get(name)]
    if len(quantized) == 2:
        yield "--load_in_4bit and --load_in_8bit exclude each other.", "Give one of them: 4 bits need less memory."
    elif quantized and not given.get("use_peft"):
        yield (
            f"--{quantized[0]} without LoRA would train nothing: rounded weights take no gradient steps.",
            f"Add --use_peft to train an adapter on the quantized base, or leave --{quantized[0]} away.",
        )


def _half_precision(given: Mapping[str, Any]) -> Problems:
    if given.get("fp16") and given.get("dtype") == "float16":
        yield (
            "--fp16 with --dtype float16: the gradient scaler refuses gradients in float16.",
            "Give --dtype float32 with --fp16 (mixed precision), or --bf16 with --dtype bfloat16.",
        )


_UNREHEARSED_OPTIMIZERS = (
    *("paged_ademamix_32bit", "paged_ademamix_8bit"),  # bitsandbytes' CPU build lacks cget_managed_ptr
    *("apollo_adamw", "apollo_adamw_layerwise"),  # its projections are drawn by values
    *("adamw_torch_4bit", "adamw_torch_8bit"),  # torchao compiles its step, which no recorder can look into
    *("adalomo", "adamw_anyprecision", "adamw_torch_xla", "adamw_torch_npu_fused"),
)


def _optimizer(method: str, given: Mapping[str, Any]) -> Problems:
    if given.get("optim") in _UNREHEARSED_OPTIMIZERS:
        yield (
            f"Not rehearsed yet, so that no plan can be made with it: --optim {given['optim']}.",
            "--optim adamw_8bit, paged_adamw_8bit, ademamix_8bit, lion_8bit and adafactor are rehearsed.",
        )
    if given.get("optimizer_offload") and method == "ppo":
        yield (
            "--optimizer_offload does not work with PPO, whose trainer makes its optimizer as it is built.",
            ("Leave it away; --optim adamw_8bit keeps a quarter of the state."),
        )
    elif given.get("optimizer_offload") and given.get("optim", "adamw_torch_fused") not in OFFLOADED:
        yield (
            f"--optimizer_offload does not know --optim {given['optim']}.",
            f"It takes --optim {', '.join(OFFLOADED)}.",
        )


def _vllm(given: Mapping[str, Any]) -> Problems:
    """vLLM's sleep mode and torch's growing segments both want to own the card's address space."""
    if given.get("use_vllm") and given.get("expandable_segments"):
        yield (
            "--expandable_segments does not work together with vLLM on the same card: vLLM refuses it.",
            "Leave --expandable_segments away.",
        )


def not_counted(job: Job, knobs: Knobs) -> tuple[str, ...]:
    """What this configuration adds to a run that its estimate leaves out, in sentences for the estimate."""
    given = job.arguments
    facts = []
    if knobs.optim.startswith("paged_"):
        facts.append(
            "large state of a paged optimizer: it lies in CUDA's managed memory, outside torch's allocator, and moves "
            "to the host when the card is full"
        )
    if given.get("chat_template_path"):
        facts.append("tokens that the chat template adds to the embeddings: a few rows of the vocabulary")
    if given.get("torch_compile"):
        facts.append("torch_compile is rehearsed uncompiled, which mostly needs more")
    if given.get("precompute_ref_batch_size"):
        facts.append(
            "scoring by the reference model before training: a forward of --precompute_ref_batch_size pairs without "
            "gradients, which is less than training unless it has several times the pairs of a micro-batch"
        )
    facts += [FOUR_BIT_NOT_COUNTED] * knobs.load_in_4bit + [EIGHT_BIT_NOT_COUNTED] * knobs.load_in_8bit
    if knobs.activation_offloading:
        facts += OFFLOADING_NOT_COUNTED
    if knobs.optimizer_offload:
        facts.append("host memory: weights and gradients are pinned there, and the optimizer's state lies beside them")
    if job.method in ("grpo", "rloo"):
        facts.append(
            "one token: all completions but the first of a generation are rehearsed one token short, so that they are "
            "padded; a loss that drops padding (trl 1.16) is low by at most one part in max_completion_length"
        )
    if job.is_online and not given.get("use_vllm"):
        facts.append(
            "holes that the KV cache leaves behind as it grows: up to 2 % of reserved memory (its steps in between are "
            "not rehearsed, and allocate less than the last)"
        )
    if given.get("use_vllm") and given.get("vllm_enable_sleep_mode"):
        facts.append(
            "vLLM's sleep mode, which frees its share of the card while the trainer trains: it is kept in full"
        )
    if given.get("fp16"):
        facts.append("fp16 is rehearsed as bfloat16, which has as many bytes; the gradient scaler adds a few scalars")
    return tuple(facts)
