"""Writes the configs of ``accelerate launch`` and of DeepSpeed for given settings, and reads DeepSpeed's.

The keys of accelerate's config are fields of ``accelerate/commands/config/config_args.py: ClusterConfig``. In
DeepSpeed's, transformers fills in each ``auto``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotrain_mem.settings.own import OffloadDevice, Sharding
from autotrain_mem.support.errors import Problem, UsageError
from autotrain_mem.types import Knobs

CP_COMM_STRATEGY = "alltoall"
"""Passes keys and values around one share at a time. accelerate's default, ``allgather``, holds those of all processes
in memory at once (``torch/distributed/tensor/experimental/_context_parallel/_attention.py: _AllGatherRotater``)."""


def accelerate_config(
    knobs: Knobs,
    *,
    mixed_precision: str = "no",
    nodes: int = 1,
    wrapped: Sequence[str] = (),
    attention: str | None = None,
) -> dict[str, Any]:
    """Returns the config's keys for these settings, except the machine's rank, address and port.

    Args:
        mixed_precision: The trainer's value: ``bf16``, ``fp16`` or ``no``. Written even if ``no``, since the launcher's
            value applies where the trainer's config sets none (``transformers/training_args.py: __post_init__``).
        wrapped: Classes of the layers to shard, if the model lacks some that its ``_no_split_modules`` names.
        attention: ``attn_implementation``, which DeepSpeed's sequence parallelism wraps
            (``deepspeed/runtime/sequence_parallel/ulysses_sp.py: register_with_transformers``); None for the model's.
    """
    alike = "MULTI_GPU" if knobs.processes > 1 else "NO"
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED" if knobs.zero_stage else "FSDP" if knobs.is_sharded else alike,
        "mixed_precision": mixed_precision,
        "num_machines": nodes,
        "num_processes": knobs.processes,
    }
    if config["distributed_type"] == "FSDP":
        named = {"fsdp_transformer_layer_cls_to_wrap": ",".join(wrapped)} if wrapped else {}
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": knobs.sharding != "fsdp2-no-reshard",
            "fsdp_offload_params": knobs.fsdp_offload_params,
            # The layers that transformers names (``_no_split_modules``).
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            # With any other type the trainer saves no model (``transformers/trainer.py: save_model``).
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            # All processes start with rank 0's weights, a new head's included.
            "fsdp_cpu_ram_efficient_loading": True,
            # transformers refuses it with the model's own (``trainer.py: create_accelerator_and_postprocess``).
            "fsdp_activation_checkpointing": False,
            **named,
        }
    if knobs.sharding == "hsdp" or knobs.token_shards > 1:
        config["parallelism_config"] = _parallelism(knobs, attention)
    return config


def _parallelism(knobs: Knobs, attention: str | None) -> dict[str, Any]:
    """Returns the sizes of accelerate's mesh; the processes that share tokens also divide the model
    (``accelerate/parallelism_config.py: dp_shard_cp_dim_names``)."""
    sizes: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": knobs.processes // knobs.shards,
        "parallelism_config_dp_shard_size": knobs.shards // knobs.token_shards,
    }
    if knobs.sp_size > 1:
        sizes |= {
            "parallelism_config_sp_size": knobs.sp_size,
            "parallelism_config_sp_backend": "deepspeed",
            "parallelism_config_sp_seq_length_is_variable": True,
            "parallelism_config_sp_attn_implementation": attention or "sdpa",
        }
    if knobs.cp_size > 1:
        sizes |= {
            "parallelism_config_cp_size": knobs.cp_size,
            "parallelism_config_cp_backend": "torch",
            "parallelism_config_cp_comm_strategy": CP_COMM_STRATEGY,
        }
    return sizes


def sharding_arguments(knobs: Knobs) -> dict[str, Any]:
    """Returns a trainer's arguments that sharding needs besides accelerate's config; the user's own override them.

    FSDP shards floating-point parameters only. So 4-bit weights are packed into parameters of the compute dtype, and
    gathered as such (``transformers/distributed/fsdp.py: update_fsdp_plugin_peft``). If they were bytes, each process
    would hold all of them (``accelerate/utils/fsdp_utils.py: fsdp2_prepare_model``). Gradients are reduced in each
    micro-step. Otherwise each process would hold whole gradients until the last micro-step
    (``accelerate/accelerator.py: no_sync``). They exceed its shards, so smaller micro-batches would take more memory.

    With context parallelism each process gets two parts of a row, an early and a late one, which balances attention
    (``torch/distributed/tensor/experimental/_context_parallel/_load_balancer.py: _HeadTailLoadBalancer``).
    DeepSpeed makes one part for each process, and rejects other lengths
    (``deepspeed/runtime/sequence_parallel/ulysses_sp.py: UlyssesSPDataLoaderAdapter.refill``).
    """
    if knobs.zero_stage:
        padded = {"pad_to_multiple_of": knobs.sp_size} if knobs.sp_size > 1 else {}
        return {"deepspeed": deepspeed_config(knobs), **padded}
    if not knobs.is_sharded:
        return {}
    reduced: dict[str, Any] = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    if knobs.cp_size > 1:
        reduced["pad_to_multiple_of"] = 2 * knobs.cp_size
    if not knobs.load_in_4bit:
        return reduced
    return {**reduced, "bnb_4bit_quant_storage": "float16" if knobs.fp16 else "bfloat16"}


BUCKET_ELEMENTS = 32 * 1024**2
"""Elements of one collective: 64 MiB in half precision, beyond which NCCL's bandwidth no longer grows (nccl-tests,
PERFORMANCE.md). DeepSpeed's default of 5e8 elements (``deepspeed/runtime/zero/config.py: reduce_bucket_size``) takes
0.93 GiB, and twice as much with ``overlap_comm``."""


def deepspeed_config(knobs: Knobs) -> dict[str, Any]:
    """Returns the config for a stage of ZeRO.

    Example: for ``zero2`` with the optimizer offloaded, ``zero_optimization`` is ``{"stage": 2, "offload_optimizer":
    {"device": "cpu", "pin_memory": True}, ...}``.
    """
    zero: dict[str, Any] = {"stage": knobs.zero_stage, "overlap_comm": True, "contiguous_gradients": True}
    if knobs.zero_stage > 1:  # stage 1 reduces a gradient larger than a bucket by itself, in float32, and keeps it
        zero["reduce_bucket_size"] = BUCKET_ELEMENTS
    if knobs.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
            "stage3_param_persistence_threshold": "auto",
            # Otherwise the trained model is saved without its weights (``transformers/trainer.py: save_model``).
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
    """Describes how processes share a model according to a DeepSpeed config."""

    sharding: Sharding
    offload_optimizer_device: OffloadDevice | None
    offload_param_device: OffloadDevice | None


_STAGES: dict[Any, Sharding] = {1: "zero1", 2: "zero2", 3: "zero3"}
_OF_TRL = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
"""DeepSpeed's key -> TRL's argument (``transformers/integrations/deepspeed.py: trainer_config_process``)."""
_NOT_REHEARSED = {
    "optimizer": "TRL's --optim makes the optimizer",
    "scheduler": "TRL's --lr_scheduler_type makes the schedule",
    "zero_optimization.zero_quantized_weights": "the quantization of ZeRO++ is not rehearsed",
    "zero_optimization.zero_quantized_gradients": "the quantization of ZeRO++ is not rehearsed",
    "zero_optimization.zero_hpz_partition_size": "the secondary shards of ZeRO++ are not rehearsed",
    "zero_optimization.zenflow": "ZenFlow is not rehearsed",
    "zero_optimization.mics_shard_size": "MiCS is not rehearsed",
    "tensor_parallel": "tensor parallelism is not rehearsed",
    "activation_checkpointing": "the model's own --gradient_checkpointing does this",
    "compression_training": "compression is not rehearsed",
}


def read_deepspeed(config: Mapping[str, Any], name: str) -> Zero:
    """Reads a DeepSpeed config; ``name`` is its path, for messages. Raises UsageError, with all problems, if it asks
    for something that is not rehearsed, or for no stage of ZeRO.

    Example: for ``{"zero_optimization": {"stage": 3}}``, sharding is ``zero3``.
    """
    if problems := [*_problems(config)]:
        raise UsageError.of(problems, f"{name} cannot be planned with: ")
    zero = config["zero_optimization"]
    return Zero(
        sharding=_STAGES[zero["stage"]],
        offload_optimizer_device=_device(zero, "offload_optimizer"),
        offload_param_device=_device(zero, "offload_param"),
    )


def with_auto(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a config with ``auto`` instead of each number that is a TRL argument, and these arguments."""
    arguments = {ours: config[key] for key, ours in _OF_TRL.items() if config.get(key, "auto") != "auto"}
    left = {**config, "train_batch_size": "auto", **dict.fromkeys(_OF_TRL, "auto")}
    return left, arguments


def _problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping) or zero.get("stage") not in _STAGES:
        yield "zero_optimization.stage is not 1, 2 or 3", "Write one of them; for stage 0, give --sharding ddp."
        return
    for key, reason in _NOT_REHEARSED.items():
        found: Any = config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        is_one = found == 1 and found is not True  # DeepSpeed's default of sizes
        if found not in (None, False, {}, -1) and not is_one:
            yield f"{key}: {reason}", f"Remove {key}."
    for part in ("offload_optimizer", "offload_param"):
        if (device := _device(zero, part)) not in (None, "cpu"):
            yield f"{part}.device {device} is not supported", f'Write "device": "cpu" for {part}.'
    if str((config.get("fp16") or {}).get("enabled")).lower() == "true":
        yield "fp16: DeepSpeed's loss scaler is not rehearsed", "Write bf16: {enabled: auto}."


def _device(zero: Mapping[str, Any], part: str) -> OffloadDevice | None:
    return None if (device := (zero.get(part) or {}).get("device")) in (None, "none") else device
