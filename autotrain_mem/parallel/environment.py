"""The environment of one process of several: what ``accelerate launch`` says to those that it starts.

Variables and defaults are those of ``accelerate/utils/launch.py: prepare_multi_gpu_env`` and, for the ranks, of
``torch/distributed/elastic/agent/server/local_elastic_agent.py``; a test compares them with accelerate's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FSDP = {
    "FSDP_VERSION": ("fsdp_version", 1),
    "FSDP_SHARDING_STRATEGY": ("fsdp_sharding_strategy", "FULL_SHARD"),
    "FSDP_RESHARD_AFTER_FORWARD": ("fsdp_reshard_after_forward", True),
    "FSDP_OFFLOAD_PARAMS": ("fsdp_offload_params", False),
    "FSDP_MIN_NUM_PARAMS": ("fsdp_min_num_params", 100_000_000),
    "FSDP_AUTO_WRAP_POLICY": ("fsdp_auto_wrap_policy", None),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("fsdp_transformer_layer_cls_to_wrap", None),
    "FSDP_BACKWARD_PREFETCH": ("fsdp_backward_prefetch", "BACKWARD_PRE"),
    "FSDP_STATE_DICT_TYPE": ("fsdp_state_dict_type", None),
    "FSDP_FORWARD_PREFETCH": ("fsdp_forward_prefetch", False),
    "FSDP_USE_ORIG_PARAMS": ("fsdp_use_orig_params", True),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": ("fsdp_cpu_ram_efficient_loading", True),
    "FSDP_SYNC_MODULE_STATES": ("fsdp_sync_module_states", True),
    "FSDP_ACTIVATION_CHECKPOINTING": ("fsdp_activation_checkpointing", False),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("fsdp_activation_checkpointing_offload", False),
    "FSDP_IGNORED_MODULES": ("fsdp_ignored_modules", None),
}
"""Variable -> the key of ``fsdp_config`` that it is, and accelerate's default; None is not said."""

_LOWER = ("RESHARD", "OFFLOAD", "PREFETCH", "USE_ORIG", "CPU_RAM", "SYNC", "ACTIVATION")

_PARALLELISM = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")


def launch_environment(config: Mapping[str, Any]) -> dict[str, str]:
    """Lists what accelerate says to every process, of the content of its config file.

    >>> launch_environment({"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"})
    {'ACCELERATE_MIXED_PRECISION': 'bf16'}
    """
    environment = {"ACCELERATE_MIXED_PRECISION": str(config.get("mixed_precision", "no"))}
    if config.get("distributed_type") == "FSDP":
        given = config.get("fsdp_config") or {}
        environment["ACCELERATE_USE_FSDP"] = "true"
        for variable, (key, default) in _FSDP.items():
            value = given.get(key, default)
            if value is None and key in ("fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap"):
                continue
            if value is not None:
                environment[variable] = str(value).lower() if isinstance(value, bool) else str(value)
    sizes = config.get("parallelism_config") or {}
    if sizes:
        environment["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        for name in _PARALLELISM:
            value = sizes.get(f"parallelism_config_{name}", 1)
            environment[f"PARALLELISM_CONFIG_{name.upper()}"] = str(value)
    return environment


def rank_environment(rank: int, processes: int, *, address: str, port: int) -> dict[str, str]:
    """Lists what one process of a single node finds of its place among the others."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    return {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
