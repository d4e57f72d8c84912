"""The config of ``accelerate launch`` that settings ask for.

Keys are the fields of ``accelerate/commands/config/config_args.py: ClusterConfig``.
"""

from __future__ import annotations

from typing import Any

from autotrain_mem.spec import Knobs

RESHARDS = {"fsdp2-no-reshard": False, "fsdp2": True, "hsdp": True, "fsdp1": "FULL_SHARD"}


def accelerate_config(knobs: Knobs, *, mixed_precision: str = "no", nodes: int = 1) -> dict[str, Any]:
    """Writes the config's keys for these settings, but for whose machine and port it is.

    The model's own gradient checkpointing recomputes activations; FSDP's stays off, so that never both do. Layers are
    wrapped as transformers names them (``_no_split_modules``).

    Args:
        mixed_precision: What the trainer's config comes to: ``bf16``, ``fp16`` or ``no``.
    """
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if knobs.is_sharded else "MULTI_GPU" if knobs.processes > 1 else "NO",
        "mixed_precision": mixed_precision,
        "num_machines": nodes,
        "num_processes": knobs.processes,
    }
    if knobs.is_sharded and knobs.sharding is not None:
        version = 1 if knobs.sharding == "fsdp1" else 2
        config["fsdp_config"] = {
            "fsdp_version": version,
            "fsdp_reshard_after_forward": RESHARDS[knobs.sharding],
            "fsdp_offload_params": knobs.fsdp_offload_params,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_activation_checkpointing": False,
        }
    if knobs.sharding == "hsdp":
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": knobs.dp_replicate_size or nodes,
            "parallelism_config_dp_shard_size": knobs.shards,
        }
    return config
