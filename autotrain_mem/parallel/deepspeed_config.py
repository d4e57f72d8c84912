"""The config of DeepSpeed that settings ask for, in the words of its JSON; ``auto`` is for transformers to fill in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Knobs
from autotrain_mem.types.knobs import OffloadDevice, Sharding

BUCKET_ELEMENTS = 32 * 1024**2
"""What one collective sends: 64 MiB in half precision, from which on NCCL's bandwidth grows no more (nccl-tests,
PERFORMANCE.md). DeepSpeed's own 5e8 elements (``deepspeed/runtime/zero/config.py: reduce_bucket_size``) are 0.93 GiB,
of which it holds one, or two with ``overlap_comm``."""


def deepspeed_config(knobs: Knobs) -> dict[str, Any]:
    """Writes the config of a stage of ZeRO.

    Example: of ``zero2`` with the optimizer offloaded ``zero_optimization`` is ``{"stage": 2, "offload_optimizer":
    {"device": "cpu", "pin_memory": True}, ...}``.
    """
    zero: dict[str, Any] = {
        "stage": knobs.zero_stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if knobs.zero_stage > 1:  # the first stage reduces what is larger than a bucket by itself, in float32, and keeps it
        zero["reduce_bucket_size"] = BUCKET_ELEMENTS
    if knobs.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
            "stage3_param_persistence_threshold": "auto",
            # Or the trained model is saved without its weights (``transformers/trainer.py: save_model``).
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    else:
        zero["allgather_bucket_size"] = BUCKET_ELEMENTS
    for name in ("optimizer", "param"):
        if device := getattr(knobs, f"offload_{name}_device"):
            zero[f"offload_{name}"] = {"device": device, "pin_memory": True}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": zero,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Zero:
    """Says how a config of DeepSpeed's has processes share a model."""

    sharding: Sharding
    offload_optimizer_device: OffloadDevice | None
    offload_param_device: OffloadDevice | None


ADAM_BUFFERS = 4
"""``deepspeed/runtime/zero/offload_config.py: DeepSpeedZeroOffloadOptimizerConfig``."""
_STAGES: dict[Any, Sharding] = {1: "zero1", 2: "zero2", 3: "zero3"}
_OF_TRL = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
"""Keys whose values are TRL's arguments too (``transformers/integrations/deepspeed.py: trainer_config_process``)."""
_NOT_REHEARSED = {
    "optimizer": "TRL's --optim makes the optimizer",
    "scheduler": "TRL's --lr_scheduler_type makes the schedule",
    "zero_optimization.zero_quantized_weights": "what ZeRO++ quantizes is not rehearsed",
    "zero_optimization.zero_quantized_gradients": "what ZeRO++ quantizes is not rehearsed",
    "zero_optimization.zero_hpz_partition_size": "the second shards of ZeRO++ are not rehearsed",
    "zero_optimization.zenflow": "ZenFlow is not rehearsed",
    "zero_optimization.mics_shard_size": "MiCS is not rehearsed",
    "tensor_parallel": "tensor parallelism is not rehearsed",
    "activation_checkpointing": "the model's own --gradient_checkpointing recomputes",
    "compression_training": "compression is not rehearsed",
}


def read_deepspeed(config: Mapping[str, Any], name: str) -> Zero:
    """Reads a config's content.

    Example: of ``{"zero_optimization": {"stage": 3}}`` sharding is ``zero3``.

    Args:
        name: What the config is called in a message: its path.

    Raises:
        UsageError: it asks for what is not rehearsed, or for no stage of ZeRO; all problems.
    """
    if problems := [*_problems(config)]:
        reasons, cures = zip(*problems, strict=True)
        raise UsageError(f"{name} cannot be planned with: {'; '.join(reasons)}.", hint="\n".join(dict.fromkeys(cures)))
    zero = config["zero_optimization"]
    return Zero(
        sharding=_STAGES[zero["stage"]],
        offload_optimizer_device=_device(zero, "offload_optimizer"),
        offload_param_device=_device(zero, "offload_param"),
    )


def with_auto(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a config with ``auto`` where TRL has an argument for a number, and these arguments."""
    said = {ours: config[key] for key, ours in _OF_TRL.items() if config.get(key, "auto") != "auto"}
    left = {**config, "train_batch_size": "auto", **dict.fromkeys(_OF_TRL, "auto")}
    return left, said


def _problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping) or zero.get("stage") not in _STAGES:
        yield "zero_optimization.stage is not 1, 2 or 3", "Write a stage; --sharding ddp divides nothing."
        return
    for key, reason in _NOT_REHEARSED.items():
        found: Any = config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        is_one = found == 1 and found is not True  # DeepSpeed's own of sizes
        if found not in (None, False, {}, -1) and not is_one:
            yield f"{key}: {reason}", f"Remove {key}."
    yield from _on_nvme(zero, config.get("aio"))
    if str((config.get("fp16") or {}).get("enabled")).lower() == "true":
        yield "fp16: DeepSpeed's scaler of the loss is not rehearsed", "Write bf16: {enabled: auto}."


def _on_nvme(zero: Mapping[str, Any], aio: Any) -> Iterator[tuple[str, str]]:
    """DeepSpeed would end with an assertion, or a division of its own, after minutes
    (``deepspeed/runtime/swap_tensor/partitioned_optimizer_swapper.py: swap_in_optimizer_state``)."""
    parts = [part for part in ("offload_optimizer", "offload_param") if _device(zero, part) == "nvme"]
    for part in parts:
        if zero["stage"] != 3:
            yield f"{part} to NVMe is of stage 3", f"Write stage: 3, or device: cpu for {part}."
        if not zero[part].get("nvme_path"):
            yield f"{part} has no nvme_path", "Write nvme_path: a folder on the disk."
    count = (zero.get("offload_optimizer") or {}).get("buffer_count", ADAM_BUFFERS)
    if "offload_optimizer" in parts and isinstance(count, int) and count < ADAM_BUFFERS:
        yield (
            f"offload_optimizer.buffer_count {count} is too few: weights, gradients and two moments are read at once",
            f"Write buffer_count: {ADAM_BUFFERS} or more.",
        )
    if parts and isinstance(aio, Mapping) and aio.get("use_gds"):
        yield "aio.use_gds: GPUDirect Storage is not rehearsed", "Remove use_gds: the host's buffers are used."


def _device(zero: Mapping[str, Any], part: str) -> OffloadDevice | None:
    device = (zero.get(part) or {}).get("device")
    return None if device in (None, "none") else device
