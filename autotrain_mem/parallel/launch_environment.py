"""Builds the environment that ``accelerate launch`` gives each process.

Variables and defaults are those of ``accelerate/utils/launch.py: prepare_multi_gpu_env`` and, for the ranks, of
``torch/distributed/elastic/agent/server/local_elastic_agent.py``; a test compares them with accelerate's own.
"""

from collections.abc import Mapping
from typing import Any

_FSDP = {
    "FSDP_VERSION": ("version", "1"),
    "FSDP_SHARDING_STRATEGY": ("sharding_strategy", "FULL_SHARD"),
    "FSDP_MIN_NUM_PARAMS": ("min_num_params", 100_000_000),
    "FSDP_AUTO_WRAP_POLICY": ("auto_wrap_policy", None),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("transformer_layer_cls_to_wrap", None),
    "FSDP_BACKWARD_PREFETCH": ("backward_prefetch", None),
    "FSDP_STATE_DICT_TYPE": ("state_dict_type", None),
    "FSDP_IGNORED_MODULES": ("ignored_modules", None),
}
"""Variable -> the key of ``fsdp_config`` without its prefix, and the default of accelerate's flag
(``accelerate/commands/launch.py: launch_command_parser``). Variables without a value are not set."""

_FSDP_SWITCHES = {
    "FSDP_RESHARD_AFTER_FORWARD": ("reshard_after_forward", "true"),
    "FSDP_OFFLOAD_PARAMS": ("offload_params", "false"),
    "FSDP_FORWARD_PREFETCH": ("forward_prefetch", "false"),
    "FSDP_USE_ORIG_PARAMS": ("use_orig_params", "true"),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": ("cpu_ram_efficient_loading", "true"),
    "FSDP_SYNC_MODULE_STATES": ("sync_module_states", "true"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("activation_checkpointing", "false"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("activation_checkpointing_offload", "false"),
}
"""Switches whose values accelerate writes in lower case."""

FSDP_KEYS = frozenset(key for key, _ in (_FSDP | _FSDP_SWITCHES).values())
"""The flags ``--fsdp_...`` of ``accelerate launch``; it ignores any other key."""

_PARALLELISM = {
    **dict.fromkeys(("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"), "1"),
    **{"cp_backend": "torch", "sp_backend": "deepspeed"},
}

_SEQUENCE = {"sp_seq_length": "None", "sp_seq_length_is_variable": "True", "sp_attn_implementation": "sdpa"}
"""Further variables for DeepSpeed's sequence parallelism, with the defaults of accelerate's flags."""


def launch_environment(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables that accelerate sets in every process for a config.

    ``ACCELERATE_DYNAMO_*`` is left out: TRL's ``--torch_compile`` sets it, and :mod:`parallel.user_config` rejects it.

    >>> launch_environment({"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"})
    {'ACCELERATE_MIXED_PRECISION': 'bf16'}
    """
    environment = {"ACCELERATE_MIXED_PRECISION": str(config.get("mixed_precision") or "no").lower()}
    if config.get("distributed_type") == "FSDP":
        given = fsdp_settings(config)
        environment["ACCELERATE_USE_FSDP"] = "true"
        values = {variable: given.get(key, default) for variable, (key, default) in _FSDP.items()}
        environment |= {variable: str(value) for variable, value in values.items() if value is not None}
        switches = {variable: given.get(key, default) for variable, (key, default) in _FSDP_SWITCHES.items()}
        environment |= {variable: str(value).lower() for variable, value in switches.items()}
    if config.get("distributed_type") == "DEEPSPEED":
        environment["ACCELERATE_USE_DEEPSPEED"] = "true"
    if sizes := config.get("parallelism_config"):
        environment["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        shares = int(sizes.get("parallelism_config_sp_size", 1)) > 1
        for name, default in (_PARALLELISM | _SEQUENCE if shares else _PARALLELISM).items():
            environment[f"PARALLELISM_CONFIG_{name.upper()}"] = str(sizes.get(f"parallelism_config_{name}", default))
        if int(environment["PARALLELISM_CONFIG_CP_SIZE"]) > 1:
            strategy = sizes.get("parallelism_config_cp_comm_strategy", "allgather")
            environment["PARALLELISM_CONFIG_CP_COMM_STRATEGY"] = str(strategy)
    return environment


def fsdp_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``fsdp_config`` without the prefix of its keys, which accelerate accepts with and without it."""
    return {name.removeprefix("fsdp_"): value for name, value in (config.get("fsdp_config") or {}).items()}


def config_of_environment(environment: Mapping[str, str], processes: int) -> dict[str, Any]:
    """Returns the config for which accelerate sets this environment.

    >>> config_of_environment({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, 4)["fsdp_config"]
    {'fsdp_version': '2'}
    """

    def is_on(variable: str) -> bool:
        return environment.get(variable, "").lower() == "true"  # as accelerate/state.py tests it

    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if is_on("ACCELERATE_USE_FSDP") else "MULTI_GPU",
        "mixed_precision": environment.get("ACCELERATE_MIXED_PRECISION", "no"),
        "num_processes": processes,
    }
    if is_on("ACCELERATE_USE_FSDP"):
        keys = {variable: f"fsdp_{key}" for variable, (key, _) in (_FSDP | _FSDP_SWITCHES).items()}
        config["fsdp_config"] = {key: environment[name] for name, key in keys.items() if name in environment}
    if is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        sizes = {name: environment.get(f"PARALLELISM_CONFIG_{name.upper()}") for name in _PARALLELISM}
        config["parallelism_config"] = {
            f"parallelism_config_{name}": int(value) if value.isdigit() else value
            for name, value in sizes.items()
            if value is not None
        }
        if strategy := environment.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY"):
            config["parallelism_config"]["parallelism_config_cp_comm_strategy"] = strategy
    return config


def rank_environment(
    rank: int, processes: int, *, address: str, port: int, local_processes: int | None = None
) -> dict[str, str]:
    """Returns the variables that give a process its rank. ``local_processes``: processes of each machine; None for a
    single machine."""
    local = local_processes or processes
    place = {"RANK": rank, "LOCAL_RANK": rank % local, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": local}
    return {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
