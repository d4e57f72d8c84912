"""Lists the levers in one table: what can be given up, least harm first, and what each saves.

A lever moves in one direction: it saves memory, usually at a cost. Levers of our own settings are declared with
the settings (``settings.own``); those of TRL's have a row here.
"""

from dataclasses import replace
from typing import Any

from autotrain_mem.settings.declaration import Harm, LeverRow, Savings
from autotrain_mem.settings.knobs import EVALUATED_ROWS, ROWS, STEPS, Knobs
from autotrain_mem.settings.optimizer_verdicts import KEEPS_UPDATES
from autotrain_mem.settings.own import OWN, UNSHARDED
from autotrain_mem.settings.words import CHECKPOINTING, MAX_LENGTH

LOST_ABOVE = 2**9
"""A bfloat16 weight this many times as large as an update does not change: with 8 significant bits, neighbouring
numbers are at least 2**-8 of their size apart, and less than half of that is rounded away."""

USUAL_WEIGHT = 0.02
"""transformers' ``initializer_range``: the approximate size of most models' weights."""

EXPANDABLE = "expandable_segments"
"""The lever that belongs to no level: any point can use it, at no cost (``search.memo: Memo``)."""

HALF_WEIGHTS = "bf16_weights"
"""The lever of 16-bit weights: float16 if the card has no bfloat16 (``search.space.half_of``)."""

EIGHT_BIT = "8bit_optimizer"

LIGER = "use_liger_kernel"
"""The lever of Liger's kernels: each setting is tried without and with them."""
PRECOMPUTING = "precompute_ref_log_probs"
"""The lever of the reference's scores: pulled on every level after its own, except with an adapter."""
NESTED_QUANT = "use_bnb_nested_quant"
SHARDING = "sharding"
SHARED_TOKENS = "cp_size"
"""Context parallelism: tried if rows are long (``search.shardings``)."""
SHARED_SEQUENCE = "sp_size"
"""DeepSpeed's sequence parallelism: tried if rows are long and the user asks for ZeRO."""
OFFLOADED_SHARDS = "fsdp_offload_params"
SMALLER_IMAGES = "max_pixels"
"""The lever of smaller images: tried if rows have images and nothing else fits (``planning.plan``)."""

_ON: dict[str, Any] = {"moves_from": (False,), "to": True}
"""What a lever does that turns a switch on."""

_OF_TRLS = (
    LeverRow(
        name="eval_batch",
        harm=Harm.NONE,
        knobs=(EVALUATED_ROWS,),
        # online methods evaluate whole groups, or only write a few samples
        suits=lambda method: not method.is_online,
        reason="the evaluation batch is no larger than the micro-batch: the same results, in more batches",
    ),
    LeverRow(
        name=LIGER,
        harm=Harm.NONE,
        **_ON,
        suits=lambda method: method.has_chunked_loss,
        reason="Liger's fused layers keep fewer activations and no logits: the same training, in other kernels",
        words="Liger's kernels",
    ),
    LeverRow(
        name="micro_batch",
        harm=Harm.TIME,
        knobs=(ROWS, STEPS),
        reason="a smaller micro-batch with more gradient accumulation: the same optimizer steps in less memory",
        if_reversed="a larger micro-batch fits, with less gradient accumulation: the same optimizer steps in less time",
    ),
    LeverRow(
        name="rollout_batch",
        harm=Harm.TIME,
        knobs=("local_rollout_forward_batch_size",),
        suits=lambda method: "local_rollout_forward_batch_size" in method.knobs,
        reason="completions are generated and scored a few rows at a time",
    ),
    LeverRow(
        name="gradient_checkpointing",
        harm=Harm.TIME,
        **_ON,
        reason="activations are recomputed in the backward pass instead of kept: the same gradients, more time",
        if_reversed="the activations fit without recomputing them, which is faster",
        usual=Savings(kept=0.25),
        at_best=Savings(kept=0.1),
    ),
    LeverRow(
        name=PRECOMPUTING,
        harm=Harm.TIME,
        **_ON,
        needs={"use_peft": (False,), "sharding": UNSHARDED},  # an adapter has no second model as its reference
        not_sharded=(
            # transformers/trainer.py: __init__ leaves the model on the host until accelerate has divided it
            "TRL scores the rows before FSDP has placed the model on the GPUs",
            "Remove --precompute_ref_log_probs, or give --sharding ddp.",
        ),
        reason="the untrained model scores all rows before training, so that no reference model is held: the same loss",
        words="reference precomputed",
        not_counted=(
            # trl/trainer/dpo_trainer.py: _precompute_ref_logps runs before the trainer prepares the model
            "the time to score all rows before training: a forward pass of each row in the dtype of the weights, "
            "without autocast, so float32 weights are slow. It needs less memory than training",
        ),
    ),
    LeverRow(
        name="activation_offloading",
        harm=Harm.TIME,
        **_ON,
        suits=lambda method: method.has_activation_offload,
        needs={"sharding": UNSHARDED},
        not_sharded=(
            "TRL's offloading of FSDP's gathered weights is not rehearsed yet",
            "Use --gradient_checkpointing true instead, which keeps as little on the card, or --sharding ddp.",
        ),
        reason="activations are in host memory until the backward pass: the same gradients, with copies both ways",
        words="activations offloaded",
        offloads=True,
        pays_for_adapters=True,
        usual=Savings(kept=0.4, slower=1.15),
        at_best=Savings(kept=0.1),
        not_counted=(
            "activation offloading copies tensors back on a separate CUDA stream, and their memory is reused only when "
            "the copies are done: how long they take depends on the card",
            "activation offloading may leave a tensor on the device if it has the address of one that was just "
            "offloaded and freed: no bound is known; this happens only after a view or a transposed tensor was saved",
        ),
    ),
    LeverRow(
        name=HALF_WEIGHTS,
        harm=Harm.ROUNDING,
        knobs=("dtype",),
        moves_from=("float32",),
        to="bfloat16",
        reason="weights and gradients take half the bytes and are rounded to bfloat16",
        without="without rounding it needs",
    ),
    LeverRow(
        name=EIGHT_BIT,
        harm=Harm.ROUNDING,
        knobs=("optim",),
        moves_from=("adamw_torch", "adamw_torch_fused"),
        to="adamw_8bit",
        needs={"optimizer_offload": (False,), "sharding": UNSHARDED},  # bitsandbytes' kernels run on the device
        reason="AdamW's two moments take one byte each per parameter, quantized block by block",
        without="without rounding it needs",
        usual=Savings(taken=0.5),
        at_best=Savings(taken=0.75),  # float32 moments of 8 bytes become 2
    ),
    LeverRow(
        name="kahan_sum",
        harm=Harm.ROUNDING,
        knobs=("optim",),
        moves_from=("adamw_torch", "adamw_torch_fused"),
        to=KEEPS_UPDATES,
        along=(HALF_WEIGHTS,),
        needs={"optimizer_offload": (False,), "sharding": UNSHARDED},  # both keep float32 copies of the weights
        reason="each step's rounding error is kept and added to the next step (Kahan summation in torch-optimi's "
        "StableAdamW), so weights in bfloat16 lose no update",
        without="without rounding it needs",
    ),
    LeverRow(
        name="nested_quant",
        harm=Harm.ROUNDING,
        knobs=(NESTED_QUANT,),
        **_ON,
        needs={"load_in_4bit": (True,)},  # Dettmers et al., "QLoRA" (arXiv 2305.14314), section 3: 0.373 bits
        reason="the scales of the base's 4-bit blocks are rounded to 8 bits: 0.37 bits fewer for each weight",
        without="without rounding it needs",
        words="scales in 8 bits",
    ),
    LeverRow(
        name="lora",
        harm=Harm.WHAT_IS_TRAINED,
        knobs=("use_peft",),
        **_ON,
        along=("bf16_weights",),  # a frozen base has no updates that rounding could lose
        turns_on_adapter=True,
        reason="a LoRA adapter is trained and the base model stays frozen",
        without="full fine-tuning needs",
        warning="trains an adapter (LoRA), not the whole model",
    ),
    LeverRow(
        name="8bit_base",
        harm=Harm.WHAT_IS_TRAINED,
        knobs=("load_in_8bit",),
        **_ON,
        along=("bf16_weights", "lora"),
        needs={"load_in_4bit": (False,), "sharding": UNSHARDED},
        quantizes=True,
        not_sharded=(
            # bitsandbytes/nn/modules.py: Linear8bitLt.init_8bit_state reads weight.CB and weight.SCB
            "bitsandbytes keeps the scales of 8-bit weights beside the parameter, which FSDP replaces",
            "Use --load_in_4bit, which can be sharded, or keep 8 bits with --sharding ddp.",
        ),
        reason="the frozen base model's linear weights take one byte each",
        without="LoRA on a base that is not quantized needs",
        words="8-bit base",
        warning="rounds the frozen base model to 8 bits, which changes its outputs a little",
        not_counted=(
            "outlier columns of 8-bit layers, which are kept in 16 bits for the backward pass: their number depends "
            "on the weights; together they take at most as much as the layers' inputs",
        ),
    ),
    LeverRow(
        name="4bit_base",
        harm=Harm.WHAT_IS_TRAINED,
        knobs=("load_in_4bit",),
        **_ON,
        also={NESTED_QUANT: True},
        along=("bf16_weights", "lora"),
        needs={"load_in_8bit": (False,), "sharding": (*UNSHARDED, "fsdp2-no-reshard", "fsdp2", "hsdp")},
        quantizes=True,
        reason="the frozen base model's linear weights take half a byte each (nf4, with scales quantized too)",
        without="LoRA on a base that is not in 4 bits needs",
        words="4-bit base",
        warning="rounds the frozen base model to 4 bits, which changes its outputs",
        not_counted=(
            "which kernel the card uses for 4-bit layers with 5 to 1536 tokens: the estimate counts one dequantized "
            "weight, so it is at most one weight too high",
        ),
    ),
    LeverRow(
        name=MAX_LENGTH,
        harm=Harm.DATA,
        suits=lambda method: not method.is_online and method.long_rows != "kept",  # TRL truncates no prompts
        reason="rows are truncated to fewer tokens",
        without="the length asked for needs",
    ),
)
"""Levers that move TRL's own settings, or several settings at once."""

LADDER = tuple(
    sorted(
        (
            *(replace(row, knobs=row.knobs or (row.name,)) for row in _OF_TRLS),
            *(each.lever for each in OWN.values() if each.lever is not None),
        ),
        key=lambda row: (row.harm, row.to is None if row.harm is Harm.NONE else row.to is not None),
    )
)
"""The levers, least harm first. At equal harm, levers over a range come before switches (after them if harmless), and
then levers of TRL's settings before ours."""

LEVERS = {row.name: row for row in LADDER}

MICRO_BATCH = "micro_batch"
BATCHES = ("eval_batch", MICRO_BATCH, "rollout_batch")
"""Levers that move over a range. They, checkpointing and sharding are allowed at every level."""
FREE = (*BATCHES, CHECKPOINTING)
OFFLOADING = tuple(row.name for row in LADDER if row.offloads)
ROUNDING = tuple(row.name for row in LADDER if row.harm is Harm.ROUNDING)
TRAINED = tuple(row.name for row in LADDER if row.harm is Harm.WHAT_IS_TRAINED)
SLOWING = (CHECKPOINTING, *OFFLOADING)
"""Levers that save memory and make each step slower, but cost nothing else."""

HARM_FIRST = tuple(sorted(LADDER, key=lambda row: -row.harm))
"""The levers in order of display: most harm first."""
SWITCHES = tuple(
    name for row in HARM_FIRST if row.to is True and row.name not in (EXPANDABLE, *FREE) for name in row.knobs
)
"""Knobs whose flag needs no value."""

WARNINGS = {row.knobs[0]: row.warning for row in LADDER if row.warning}
"""Knob -> the warning of the lever that moves it."""


def is_pulled(row: LeverRow, knobs: Knobs) -> bool:
    """Returns whether a point has the value that this lever sets; False for a lever over a range."""
    return row.to is not None and getattr(knobs, row.knobs[0]) == row.to


def brought(base: Knobs, knobs: Knobs) -> frozenset[str]:
    """Returns the knobs that levers set besides their own (``LeverRow.also``), for levers the job did not ask for."""
    return frozenset(name for row in LADDER if is_pulled(row, knobs) and not is_pulled(row, base) for name in row.also)


def taken_back(row: LeverRow, knobs: Knobs, base: Knobs) -> Knobs | None:
    """Returns the point with one lever's knobs reset to the job's values. None if they have these values already, or if
    the lever is free, moves over a range, changes what is trained or the data, or came with another lever."""
    is_alone = row.to is not None and row.name not in (EXPANDABLE, *FREE) and row.harm <= Harm.ROUNDING
    values = {name: getattr(base, name) for name in row.knobs}
    is_alone = is_alone and brought(base, knobs).isdisjoint(row.knobs)
    if not is_alone or all(getattr(knobs, name) == value for name, value in values.items()):
        return None
    return replace(knobs, **values)


def pulled(knobs: Knobs) -> list[LeverRow]:
    """Lists the levers whose values a point has, least harm first."""
    return [row for row in LADDER if is_pulled(row, knobs)]
