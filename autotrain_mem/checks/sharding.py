"""Refuses arguments that do not work with sharding (FSDP, ZeRO), or are not rehearsed with it.

The search does not combine them either. ``settings.levers`` gives the reason for each lever that excludes sharding.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from autotrain_mem.checks.flag_checks import Flags
from autotrain_mem.checks.model_files import ModelOnCard
from autotrain_mem.search.shardings import NOT_WITH, WAYS, SharedTokens
from autotrain_mem.settings.knobs import BASE_BITS, ZEROS
from autotrain_mem.settings.levers import LADDER, OFFLOADING, SHARED_SEQUENCE
from autotrain_mem.settings.own import SHARE_TOKENS
from autotrain_mem.types import METHODS, Problems

FSDP = ("fsdp2-no-reshard", "fsdp2", "hsdp")
_UNDIVIDED = {row.knobs[0]: row.not_sharded for row in LADDER if row.not_sharded}


@dataclass(frozen=True, kw_only=True, slots=True)
class Incompatible:
    """Describes arguments that do not work with sharding."""

    names: Collection[str]
    values: str = ""
    """A pattern of the values that do not work; empty for switches."""
    shardings: tuple[str, ...] = FSDP
    reason: str
    cure: str


REFUSED = (
    *(Incompatible(names=[name], reason=reason, cure=cure) for name, (reason, cure) in _UNDIVIDED.items()),
    Incompatible(  # bitsandbytes/backends/cuda/ops.py: custom operators on pointers, unknown to DTensor
        names=["optim"],
        values=r".*(8bit|bnb|paged|ademamix|lion).*",
        reason="bitsandbytes' kernels do not support FSDP2's tensors",
        cure="--optim adamw_torch_fused keeps a share of its state on each GPU; or --sharding ddp.",
    ),
    Incompatible(  # transformers/trainer.py: _build_accelerator_args and what follows refuse it with SHARDED_STATE_DICT
        names=["save_only_model"],
        reason="transformers saves sharded checkpoints only with the optimizer's state",
        cure="Remove --save_only_model, or give --save_strategy no: the trained model is written whole at the end.",
    ),
    Incompatible(
        names=[name for name in OFFLOADING if name in _UNDIVIDED],
        shardings=ZEROS,
        reason="it is not rehearsed together with DeepSpeed's own offload",
        cure="--offload_optimizer_device cpu has DeepSpeed keep the optimizer's state on the host.",
    ),
    Incompatible(
        names=BASE_BITS,
        shardings=ZEROS,
        reason="quantized weights under DeepSpeed are not rehearsed yet",
        cure="--sharding fsdp2 shards a base model in 4 bits; or train without quantization.",
    ),
    Incompatible(
        names=["optim"],
        values=r".*(8bit|bnb|paged|ademamix|lion|adafactor).*",
        shardings=ZEROS,
        reason="its state for flattened shards of the weights is not rehearsed yet",
        cure="--optim adamw_torch_fused keeps a share of its state on each GPU.",
    ),
    Incompatible(
        names=["fp16"],
        shardings=ZEROS,
        reason="DeepSpeed's loss scaler is not rehearsed yet",
        cure="--bf16 trains in half precision without one; or --sharding fsdp2.",
    ),
    Incompatible(
        names=["use_vllm"],
        shardings=ZEROS,
        reason="the transfer of weights from DeepSpeed to vLLM is not rehearsed yet",
        cure="Remove --use_vllm, or give --sharding fsdp2 or ddp.",
    ),
    Incompatible(  # trl/trainer/callbacks.py: SyncRefModelCallback.sync_target_model
        names=["sync_ref_model"],
        shardings=("zero3",),
        reason="TRL gathers the whole policy and reference on each GPU to mix them",
        cure="Give --sharding zero2 or fsdp2, or remove --sync_ref_model.",
    ),
)


def arguments(flags: Flags) -> Problems:
    """Refuses arguments that do not work with the requested sharding."""
    sharding = flags.given.get("sharding")
    for row in REFUSED:
        for name in row.names:
            value = flags.given.get(name)
            matches = re.fullmatch(row.values, str(value)) is not None if row.values else bool(value)
            if value is not None and matches and sharding in row.shardings:
                asked = f"--{name} {value}" if row.values else f"--{name}"
                yield f"{asked} does not work with --sharding {sharding}: {row.reason}.", row.cure


def shared_tokens(flags: Flags) -> Problems:
    """Checks how GPUs divide a row's tokens in SFT: ring attention with FSDP2, or DeepSpeed's Ulysses with ZeRO."""
    asked = [WAYS[name] for name in SHARE_TOKENS if _size(flags.given, name) > 1]
    if len(asked) > 1:  # accelerate/parallelism_config.py: __post_init__
        yield (
            "--cp_size and --sp_size both divide a row's tokens among GPUs; accelerate accepts only one of them.",
            "Remove --sp_size (FSDP2 then divides the model), or --cp_size (ZeRO-3).",
        )
    for way in asked:
        yield from _shared(flags, way, _size(flags.given, way.name))


def _size(given: Mapping[str, Any], name: str) -> int:
    return size if isinstance(size := given.get(name), int) else 1


def _shared(flags: Flags, way: SharedTokens, size: int) -> Problems:
    given, asked = flags.given, f"--{way.name} {size}"
    if not METHODS[flags.method].shares_tokens:
        # transformers/trainer.py: _prepare_context_parallel_inputs cuts input_ids and labels; others need more columns
        yield (
            f"{asked} is for SFT: {METHODS[flags.method].title}'s trainer needs whole rows on each GPU.",
            f"Remove {asked}.",
        )
    if given.get("sharding") not in (None, *way.shardings):
        yield (
            f"{asked} does not work with --sharding {given['sharding']}: {way.owner}.",
            f"Give --sharding {way.shardings[-1]}, or remove --sharding.",
        )
    for name, (reason, instead) in NOT_WITH.items():
        if given.get(name):
            yield f"--{name} does not work with {asked}: {reason}.", f"Give {instead}, or --{way.name} 1."
    if way.in_half_precision and given.get("bf16") is False and not given.get("fp16"):
        yield (
            f"--bf16 false does not work with {asked}: ring attention runs CUDA's half-precision kernels.",
            f"Give --bf16, or --{way.name} 1.",
        )
    attention = given.get("attn_implementation")
    if attention is not None and re.fullmatch(way.attention, str(attention)) is None:
        yield (
            f"--attn_implementation {attention} does not work with {asked}: {way.attends}.",
            "Give --attn_implementation sdpa, which has its own flash kernel on CUDA.",
        )
    multiple, parts = given.get("pad_to_multiple_of"), way.parts * size
    if isinstance(multiple, int) and multiple % parts:
        yield (
            f"--pad_to_multiple_of {multiple} does not work with {asked}: rows are cut into {parts} equal parts.",
            f"Give --pad_to_multiple_of {parts} or a multiple, or remove it.",
        )


def shared_attention(subject: ModelOnCard) -> Problems:
    """Refuses context and sequence parallelism unless all layers have full attention: otherwise accelerate fails
    when training starts (``accelerate/big_modeling.py: _attach_context_parallel_hooks``), and DeepSpeed passes no mask
    (``deepspeed/runtime/sequence_parallel/ulysses_sp.py: uattn_wrapper``). DeepSpeed also divides the heads, whose
    number must be a multiple of ``sp_size`` (``__init__``)."""
    for name in SHARE_TOKENS:
        size = _size(subject.job.arguments, name)
        others = other_layers(subject.config) if size > 1 else []
        if others:
            yield (
                f"--{name} {size} does not work with {subject.job.model}: it needs full attention in all layers, and "
                f"some are {', '.join(others)}.",
                f"Remove --{name}, or use a model with full attention (Llama, Qwen2.5, Qwen3).",
            )
    size, text = _size(subject.job.arguments, SHARED_SEQUENCE), subject.config.get_text_config()
    heads = int(getattr(text, "num_attention_heads", None) or 0)
    keys = int(getattr(text, "num_key_value_heads", None) or heads)
    sizes = [each for each in range(1, size + 1) if not heads % each and (not keys % each or not each % keys)]
    if size > 1 and size not in sizes:
        yield (
            f"--sp_size {size} does not divide the attention heads of {subject.job.model} evenly among GPUs.",
            f"Give --sp_size {sizes[-1]} or less." if len(sizes) > 1 else "Remove --sp_size.",
        )


def other_layers(config: Any) -> list[str]:
    """Returns the types of a model's layers without full attention, as accelerate determines them."""
    text = config.get_text_config()
    if (kinds := getattr(text, "layer_types", None)) is not None:
        return sorted({*kinds} - {"full_attention"})
    return ["sliding_attention"] if getattr(text, "sliding_window", None) else []


def optimizer_on_host(flags: Flags) -> Problems:
    """Refuses optimizers on the host that accelerate would silently replace with DeepSpeed's Adam
    (``accelerate/utils/deepspeed.py: map_pytorch_optim_to_deepspeed``)."""
    optim, file = flags.given.get("optim"), flags.given.get("deepspeed")
    if isinstance(file, Mapping) and file.get("zero_force_ds_cpu_optimizer") is False:
        return  # DeepSpeed then runs the given optimizer
    if flags.given.get("offload_optimizer_device") and optim not in (None, "adamw_torch", "adamw_torch_fused"):
        yield (
            f"--optim {optim} does not work with --offload_optimizer_device: DeepSpeed would run its own Adam instead.",
            "Give --optim adamw_torch_fused, or remove --offload_optimizer_device.",
        )


def on_the_cpu(flags: Flags) -> Problems:
    """Refuses DeepSpeed on the CPU, where its engine behaves differently and is not rehearsed."""
    sharding = flags.given.get("sharding")
    if flags.given.get("use_cpu") and sharding in ZEROS:
        yield (
            f"--sharding {sharding} with --use_cpu is not supported: DeepSpeed is rehearsed for GPUs only.",
            "Remove --sharding, or try it on a simulated card: --gpu NAME --simulate.",
        )


def method(flags: Flags) -> Problems:
    """Refuses sharding for trainers that call models without the wrapper that gathers weights
    (``trl/experimental/ppo/ppo_trainer.py: train``, ``.../online_dpo/online_dpo_trainer.py: _generate``)."""
    sharding, facts = flags.given.get("sharding"), METHODS[flags.method]
    if facts.holds_models_whole and sharding not in (None, "ddp"):
        yield (
            f"--sharding {sharding} does not work with {facts.title}: its trainer calls models directly, without the "
            "wrapper that gathers sharded weights.",
            "Give --sharding ddp: each GPU then holds all models. LoRA needs less: --use_peft.",
        )
