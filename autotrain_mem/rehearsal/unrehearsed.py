"""What a rehearsal cannot tell yet: arguments that are refused, since their memory would be mispredicted, and those
whose share is only named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autotrain_mem.rehearsal.lens.bitsandbytes import EIGHT_BIT_NOT_COUNTED, FOUR_BIT_NOT_COUNTED
from autotrain_mem.rehearsal.lens.host import NOT_COUNTED as OFFLOADING_NOT_COUNTED
from autotrain_mem.spec import Job, Knobs

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


Problems = Iterator[tuple[str, str]]
"""What is wrong, and what to do about it."""


def unrehearsed(given: Mapping[str, Any]) -> Problems:
    """All arguments that a rehearsal would mispredict or a run could not use."""
    yield from _padding_free(given)
    yield from _rows(given)
    yield from _optimizer(given)
    yield from _arguments(given)


def _arguments(given: Mapping[str, Any]) -> Problems:
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


def _rows(given: Mapping[str, Any]) -> Problems:
    """Batches whose rows are not those that a worst batch is made of."""
    packing, eval_packing = bool(given.get("packing")), given.get("eval_packing")
    evaluates = str(given.get("eval_strategy", "no")) != "no"
    if evaluates and eval_packing is not None and bool(eval_packing) is not packing:
        yield (
            "--eval_packing other than --packing evaluates on other rows than it trains on, which no plan allows for.",
            "Leave --eval_packing away: it follows --packing.",
        )
    options = given.get("dataset_kwargs")
    if isinstance(options, Mapping) and options.get("skip_prepare_dataset"):
        yield (
            "--dataset_kwargs skip_prepare_dataset trains on rows that TRL does not truncate: no plan allows for them.",
            "Leave it away; rows that are tokenized already (input_ids) are taken as they are.",
        )
    if given.get("train_sampling_strategy") == "batch_rebalance":
        yield (
            "--train_sampling_strategy batch_rebalance puts more rows into a micro-batch than a plan allows for.",
            "--train_sampling_strategy random or group_by_length keeps --per_device_train_batch_size rows.",
        )


_UNREHEARSED_OPTIMIZERS = (
    *("paged_ademamix_32bit", "paged_ademamix_8bit"),  # bitsandbytes' CPU build lacks cget_managed_ptr
    *("apollo_adamw", "apollo_adamw_layerwise"),  # its projections are drawn by values
    *("adamw_torch_4bit", "adamw_torch_8bit"),  # torchao compiles its step, which no recorder can look into
    *("adalomo", "adamw_anyprecision", "adamw_torch_xla", "adamw_torch_npu_fused"),
)


def _optimizer(given: Mapping[str, Any]) -> Problems:
    if given.get("optim") in _UNREHEARSED_OPTIMIZERS:
        yield (
            f"Not rehearsed yet, so that no plan can be made with it: --optim {given['optim']}.",
            "--optim adamw_8bit, paged_adamw_8bit, ademamix_8bit, lion_8bit and adafactor are rehearsed.",
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
    if knobs.fp16:
        facts.append("the scaler of fp16's gradients: a few scalars")
    return tuple(facts)
