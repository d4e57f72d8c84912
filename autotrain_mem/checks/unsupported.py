"""Refuses arguments that a rehearsal cannot follow yet, since their memory would be mispredicted."""

from __future__ import annotations

from collections.abc import Mapping

from autotrain_mem.checks.collect import Problems
from autotrain_mem.checks.flags import Flags

_NOT_SAMPLED = "generation is rehearsed as transformers' own loop: remove it"
_ONE_GPU = "plans are for one GPU so far: remove it"
REFUSED = {
    "deepspeed": _ONE_GPU,
    "fsdp": _ONE_GPU,
    "fsdp_config": _ONE_GPU,
    "parallelism_config": _ONE_GPU,
    "model_init_kwargs": "--dtype and --attn_implementation are rehearsed",
    "use_transformers_paged": _NOT_SAMPLED,
    "use_transformers_continuous_batching": _NOT_SAMPLED,
    "auto_find_batch_size": "autofit finds the batch itself, and keeps the effective batch: remove it",
}
"""Argument -> what to do instead. Each would be planned for as if it were not there, or end the rehearsal."""


def arguments(flags: Flags) -> Problems:
    """Arguments that a rehearsal passes over, or that end it."""
    given = flags.given
    refused = [name for name in REFUSED if given.get(name)]
    if refused:
        yield (
            f"{', '.join(f'--{name}' for name in refused)} {'is' if len(refused) == 1 else 'are'} not supported yet.",
            "\n".join(f"--{name}  {REFUSED[name]}" for name in refused),
        )


def padding_free(flags: Flags) -> Problems:
    """Rows in one sequence must be of a length that TRL limits."""
    given = flags.given
    if given.get("padding_free") and not given.get("packing"):
        yield (
            "--padding_free without --packing trains on rows that TRL does not truncate, which no plan allows for yet.",
            "Give --packing true, which is padding-free with its default strategy.",
        )


def rows(flags: Flags) -> Problems:
    """Batches whose rows are not those that a worst batch is made of."""
    given = flags.given
    packing, eval_packing = bool(given.get("packing")), given.get("eval_packing")
    evaluates = str(given.get("eval_strategy", "no")) != "no"
    if evaluates and eval_packing is not None and bool(eval_packing) is not packing:
        yield (
            "--eval_packing other than --packing evaluates on other rows than it trains on, which no plan allows for.",
            "Remove --eval_packing: it follows --packing.",
        )
    options = given.get("dataset_kwargs")
    if isinstance(options, Mapping) and options.get("skip_prepare_dataset"):
        yield (
            "--dataset_kwargs skip_prepare_dataset trains on rows that TRL does not truncate: no plan allows for them.",
            "Remove it; rows that are tokenized already (input_ids) are taken as they are.",
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


def optimizer(flags: Flags) -> Problems:
    """Some optimizers cannot be rehearsed."""
    given = flags.given
    if given.get("optim") in _UNREHEARSED_OPTIMIZERS:
        yield (
            f"--optim {given['optim']} is not supported yet.",
            "--optim adamw_8bit, paged_adamw_8bit, ademamix_8bit, lion_8bit and adafactor are rehearsed.",
        )
