"""Refuses arguments that a rehearsal cannot follow yet, since their memory would be mispredicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
