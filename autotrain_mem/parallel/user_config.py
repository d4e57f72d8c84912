"""Reads a user's own config of ``accelerate launch``, and rejects settings that cannot be planned for.

Keys, defaults and exclusions are those of ``accelerate/commands/config/config_args.py: ClusterConfig`` and of
``accelerate/utils/dataclasses.py: FullyShardedDataParallelPlugin``.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotrain_mem.parallel.launch_environment import FSDP_KEYS, fsdp_settings
from autotrain_mem.settings.own import Sharding
from autotrain_mem.support.errors import Problem, UsageError

KEYS = frozenset(
    {"compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes", "machine_rank"}
    | {"num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network", "commands"}
    | {"main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config", "tpu_env"}
    | {"parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone", "tpu_vm"}
    | {"tpu_use_cluster", "tpu_use_sudo", "command_file", "dynamo_config"}
)
"""All keys that accelerate accepts; it rejects a file with any other."""
OLD_KEYS = frozenset({"fp16", "dynamo_backend"})
"""Keys of older versions, which accelerate still reads (``config_args.py: process_config``)."""

_WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")

_FSDP2 = "distributed_type: FSDP with fsdp_version: 2 divides weights, gradients and optimizer state"
_OTHER_TYPES = {
    "MEGATRON_LM": ("Megatron-LM is not rehearsed", f"{_FSDP2}."),
    "XLA": ("TPUs are not rehearsed", "distributed_type: MULTI_GPU trains on GPUs."),
    "MULTI_CPU": ("training on several CPUs is not supported", "distributed_type: NO with --use_cpu trains on one."),
}
TO_FSDP2 = "accelerate to-fsdp2 --config_file FILE --output_file NEW converts the file"
_STAGE = 2
"""The default stage of ZeRO (``accelerate/utils/dataclasses.py: DeepSpeedPlugin.__post_init__``)."""
_ZEROS: Mapping[str, Sharding] = {"1": "zero1", "2": "zero2", "3": "zero3"}
_SP_ATTENTION = "parallelism_config_sp_attn_implementation"
_TENSORS = "tensor parallelism is not rehearsed, since transformers splits layers while it loads them"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Describes how processes are launched according to a config."""

    processes: int | None
    """None if the config leaves the number open: ``num_processes: -1``."""
    nodes: int
    sharding: Sharding | None
    """None for a single process, or if a DeepSpeed file determines the sharding."""
    dp_replicate_size: int | None
    cp_size: int
    sp_size: int
    sp_attention: str
    """``attn_implementation`` that sequence parallelism wraps."""
    fsdp_offload_params: bool
    mixed_precision: str
    """``bf16``, ``fp16`` or ``no``; ``no`` leaves it to TRL's own flags."""
    recomputes: bool
    """Whether FSDP recomputes activations, so that the model's own checkpointing must be off."""
    warnings: tuple[str, ...] = ()


def read_launch(config: Mapping[str, Any], name: str) -> Launch:
    """Reads a config of ``accelerate launch``; ``name`` is its path, for messages. Raises UsageError, with all
    problems, if it is invalid, contradicts itself, or asks for something that is not rehearsed.

    Example: for ``{"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_version": 2}}``, sharding is
    ``fsdp2``.
    """
    if problems := [*_problems(config)]:
        raise UsageError.of(problems, f"{name} cannot be planned with: ")
    settings, sizes = fsdp_settings(config), _sizes(config)
    replicas = sizes.get("dp_replicate_size", 1)
    is_fsdp = _type(config) == "FSDP"
    return Launch(
        processes=_processes(config),
        nodes=int(config.get("num_machines") or 1),
        sharding=_sharding(config, settings, replicas),
        dp_replicate_size=replicas if replicas > 1 else None,
        cp_size=sizes.get("cp_size", 1),
        sp_size=sizes.get("sp_size", 1),
        sp_attention=str((config.get("parallelism_config") or {}).get(_SP_ATTENTION, "sdpa")),
        fsdp_offload_params=is_fsdp and _is_true(settings.get("offload_params")),
        mixed_precision=_mixed_precision(config),
        recomputes=is_fsdp and _is_true(settings.get("activation_checkpointing")),
        warnings=(*_started(config), *(_warnings(settings) if is_fsdp else ())),
    )


def _type(config: Mapping[str, Any]) -> str:
    value = config.get("distributed_type")
    return "NO" if value is False else str(value)  # YAML reads NO without quotes as false


def _is_true(value: object) -> bool:
    """Reads a truth value as ``accelerate/utils/environment.py: str_to_bool`` does."""
    return str(value).lower() in ("true", "1", "yes", "y", "t", "on")


def _processes(config: Mapping[str, Any]) -> int | None:
    if _type(config) == "NO":
        return 1
    return None if (count := config.get("num_processes", -1)) == -1 else int(count)


def _mixed_precision(config: Mapping[str, Any]) -> str:
    given = config.get("mixed_precision") or ("fp16" if config.get("fp16") else "no")
    return str(given).lower()


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Returns those sizes of ``parallelism_config`` that are whole numbers."""
    given = config.get("parallelism_config") or {}
    names = {name: name.removeprefix("parallelism_config_") for name in given}
    return {names[name]: value for name, value in given.items() if isinstance(value, int) and name != names[name]}


def _sharding(config: Mapping[str, Any], settings: Mapping[str, Any], replicas: int) -> Sharding | None:
    if _type(config) == "NO" or (_processes(config) == 1 and _type(config) != "DEEPSPEED"):
        return None
    if _type(config) == "MULTI_GPU":
        return "ddp"
    if _type(config) == "DEEPSPEED":
        given = zero_settings(config)
        return None if "deepspeed_config_file" in given else _ZEROS[str(given.get("zero_stage", _STAGE))]
    if replicas > 1:
        return "hsdp"
    return "fsdp2" if _is_true(settings.get("reshard_after_forward", True)) else "fsdp2-no-reshard"


def _started(config: Mapping[str, Any]) -> Iterator[str]:
    # ``accelerate/commands/launch.py: launch_command`` then uses its simple_launcher.
    if _type(config) == "NO" and (config.get("num_processes") or 1) > 1:
        yield (
            f"distributed_type NO starts one process, whatever num_processes ({config['num_processes']}) says; "
            "MULTI_GPU (DDP) or FSDP starts several"
        )


def _warnings(settings: Mapping[str, Any]) -> Iterator[str]:
    # accelerate's default is no policy (``dataclasses.py: FullyShardedDataParallelPlugin.__post_init__``).
    if str(settings.get("auto_wrap_policy") or "NO_WRAP").upper() == "NO_WRAP":
        yield (
            "fsdp_auto_wrap_policy is not set, so FSDP gathers all layers at once; TRANSFORMER_BASED_WRAP gathers them "
            "one by one"
        )
    kind = str(settings.get("state_dict_type") or "SHARDED_STATE_DICT")
    if kind.upper() != "FULL_STATE_DICT":
        yield (
            f"fsdp_state_dict_type {kind}: the trainer saves sharded checkpoints only, and no model at the end "
            "(transformers/trainer.py: save_model); FULL_STATE_DICT saves the model too"
        )
    for key in sorted(settings.keys() - FSDP_KEYS):
        near = difflib.get_close_matches(key, FSDP_KEYS, n=1)
        meant = f"; did you mean fsdp_{near[0]}?" if near else ""
        yield f"accelerate ignores fsdp_{key}{meant}"


def _problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    blocks = ("fsdp_config", "parallelism_config", "dynamo_config", "deepspeed_config")
    if wrong := [name for name in blocks if not isinstance(config.get(name) or {}, Mapping)]:
        for name in wrong:
            yield f"{name} is not a mapping", f"Write {name}: and indented keys below it."
        return
    for key in sorted(config.keys() - KEYS - OLD_KEYS):
        near = difflib.get_close_matches(key, KEYS, n=1)
        fix = f"Did you mean {near[0]}?" if near else f"Remove {key}: accelerate launch rejects it too."
        yield f"{key} is not a key of accelerate's config", fix
    for check in (_kind, _counts, *((_fsdp,) if _type(config) == "FSDP" else ()), _parallelism):
        yield from check(config)


def _kind(config: Mapping[str, Any]) -> Iterator[Problem]:
    if str(config.get("compute_environment", "LOCAL_MACHINE")) != "LOCAL_MACHINE":
        where = config["compute_environment"]
        yield f"compute_environment {where} runs on unknown devices", "compute_environment: LOCAL_MACHINE."
    if (kind := _type(config)) == "DEEPSPEED":
        yield from _zero(config)
    elif kind in _OTHER_TYPES:
        why, cure = _OTHER_TYPES[kind]
        yield f"distributed_type {kind}: {why}", cure
    elif "distributed_type" not in config:
        yield "distributed_type is not set", "distributed_type: MULTI_GPU is DDP, FSDP shards."
    elif kind not in ("NO", "MULTI_GPU", "FSDP"):
        yield f"distributed_type {kind} is not supported", "Use distributed_type NO, MULTI_GPU, FSDP or DEEPSPEED."
    if _is_true(config.get("use_cpu", False)):
        yield "use_cpu true: several processes need GPUs", "Remove use_cpu; --use_cpu trains on the CPU."
    dynamo = config.get("dynamo_config") or config
    backend = str(dynamo.get("dynamo_backend") or dynamo.get("backend") or "NO")  # either name, as accelerate reads it
    if backend.upper() != "NO":
        yield f"dynamo_backend {backend} duplicates a TRL flag", "Remove dynamo_config; use --torch_compile."
    if config.get("fp8_config") or str(config.get("mixed_precision")).lower() == "fp8":
        yield "fp8 is not rehearsed", "mixed_precision: bf16 is the nearest; remove fp8_config."
    elif (given := _mixed_precision(config)) not in ("no", "bf16", "fp16"):
        yield f"mixed_precision {given} is unknown", "mixed_precision takes no, bf16 or fp16."


def _zero(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Checks the keys of ``accelerate/utils/dataclasses.py: DeepSpeedPlugin``; a DeepSpeed file is read separately."""
    given = zero_settings(config)
    if "deepspeed_config_file" in given:
        return
    if str(given.get("zero_stage", _STAGE)) not in ("1", "2", "3"):
        stage = given["zero_stage"]
        yield f"zero_stage {stage} shards nothing", "distributed_type: MULTI_GPU is DDP; or zero_stage: 3."
    for part in ("optimizer", "param"):
        if (device := str(given.get(f"offload_{part}_device") or "none")) not in ("none", "cpu"):
            yield f"offload_{part}_device {device} is not supported", f"offload_{part}_device: cpu"
    if given.get("deepspeed_moe_layer_cls_names"):
        yield "deepspeed_moe_layer_cls_names is not rehearsed", "Remove it."


def zero_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``deepspeed_config``, or an empty dict if it is not a mapping."""
    return dict(given) if isinstance(given := config.get("deepspeed_config"), Mapping) else {}


def _counts(config: Mapping[str, Any]) -> Iterator[Problem]:
    numbers = {name: config.get(name) for name in ("num_processes", "num_machines")}
    for name, value in numbers.items():
        unset = value is None or (name == "num_processes" and value == -1)
        if not unset and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            yield f"{name} {value!r} is not a positive whole number", f"{name}: 1 or more."
            return
    processes, nodes = config.get("num_processes") or -1, config.get("num_machines") or 1
    if processes > 0 and processes % nodes:
        cure = f"num_processes is the sum over all machines: {processes * nodes} are {processes} on each of {nodes}."
        yield f"num_processes {processes} is not a multiple of num_machines {nodes}", cure
    if _type(config) == "FSDP" and processes == 1:
        cure = "distributed_type: NO, or num_processes: 2 or more."
        yield "distributed_type FSDP needs several processes", cure
    ids = str(config.get("gpu_ids") or "all")
    if ids != "all" and ids.split(",") != [str(index) for index in range(max(1, processes // nodes))]:
        cure = f"Remove gpu_ids and set CUDA_VISIBLE_DEVICES={ids} before the command."
        yield f"gpu_ids {ids} selects some of the GPUs", cure


def _fsdp(config: Mapping[str, Any]) -> Iterator[Problem]:
    settings = fsdp_settings(config)
    if (version := str(settings.get("version", 1))) != "2":
        yield f"fsdp_version {version} is not supported", f"fsdp_version: 2; {TO_FSDP2}."
        return
    reshard = str(settings.get("reshard_after_forward", True))
    if reshard.lower() not in ("true", "false"):
        cure = "fsdp_reshard_after_forward: true for FULL_SHARD, false for SHARD_GRAD_OP."
        yield f"fsdp_reshard_after_forward {reshard} is a value of FSDP1", cure
    if (policy := settings.get("auto_wrap_policy")) is not None and str(policy).upper() not in _WRAPS:
        yield f"fsdp_auto_wrap_policy {policy} is unknown", f"fsdp_auto_wrap_policy takes {', '.join(_WRAPS)}."
    if _is_true(settings.get("activation_checkpointing_offload")):
        cure = "Remove it; fsdp_activation_checkpointing works without it."
        yield "fsdp_activation_checkpointing_offload is not rehearsed", cure
    loads_once, is_synced = (
        _is_true(settings.get(name, True)) for name in ("cpu_ram_efficient_loading", "sync_module_states")
    )
    if loads_once and not is_synced:
        cure = "fsdp_sync_module_states: true, as accelerate launch requires."
        yield "fsdp_cpu_ram_efficient_loading loads weights in one process only", cure


def _parallelism(config: Mapping[str, Any]) -> Iterator[Problem]:
    if not config.get("parallelism_config"):
        return
    sizes, processes = _sizes(config), _processes(config)
    if (tensors := sizes.get("tp_size", 1)) > 1:
        key, shards = "parallelism_config_tp_size", tensors * sizes.get("dp_shard_size", 1)
        cure = f"{key}: 1 and parallelism_config_dp_shard_size: {shards} shard the model over as many GPUs."
        yield f"{key} {tensors}: {_TENSORS}", cure
        return
    if _type(config) == "DEEPSPEED":
        yield from _sequence(sizes, processes)
        return
    if (shared := sizes.get("sp_size", 1)) > 1:
        cure = f"distributed_type: DEEPSPEED with zero_stage: 3; or parallelism_config_cp_size: {shared} with FSDP2."
        yield f"parallelism_config_sp_size {shared}: sequence parallelism needs DeepSpeed", cure
        return
    if _type(config) != "FSDP":
        yield "parallelism_config needs FSDP2", "distributed_type: FSDP, with fsdp_version: 2."
        return
    replicas, shards = sizes.get("dp_replicate_size", 1), sizes.get("dp_shard_size", 1)
    if (context := sizes.get("cp_size", 1)) > 1 and replicas > 1:
        cure = "parallelism_config_dp_replicate_size: 1, or parallelism_config_cp_size: 1."
        yield "context parallelism with HSDP (cp_size with dp_replicate_size) is not rehearsed", cure
    elif shards == 1 and context == 1:
        cure = "Set parallelism_config_dp_shard_size to the number of GPUs per model; or remove parallelism_config."
        yield "parallelism_config_dp_shard_size 1 shards nothing", cure
    elif processes is not None and replicas * shards * context != processes:
        product = replicas * shards * context
        given = f"dp_replicate_size {replicas} x dp_shard_size {shards} x cp_size {context} = {product}"
        yield f"{given}, but num_processes is {processes}", f"num_processes: {product}, or other sizes."


def _sequence(sizes: Mapping[str, int], processes: int | None) -> Iterator[Problem]:
    """Checks mesh sizes: accelerate derives ZeRO's batch size from them (``accelerator.py: _prepare_deepspeed``)."""
    shared = sizes.get("sp_size", 1)
    groups = sizes.get("dp_replicate_size", 1) * sizes.get("dp_shard_size", 1)
    if sizes.get("cp_size", 1) > 1:
        size = sizes["cp_size"]
        cure = f"parallelism_config_sp_size: {size} instead; or distributed_type: FSDP with fsdp_version: 2."
        yield f"parallelism_config_cp_size {size}: context parallelism needs FSDP2", cure
    elif shared == 1:
        yield "parallelism_config has no effect under DeepSpeed without sp_size", "Remove parallelism_config."
    elif processes is not None and processes % shared:
        yield f"sp_size {shared} does not divide {processes} processes", f"num_processes: {shared} or a multiple."
    elif processes is not None and groups * shared != processes:
        cure = f"parallelism_config_dp_shard_size: {processes // shared}, without parallelism_config_dp_replicate_size."
        yield f"dp_shard_size {groups} x sp_size {shared} = {groups * shared}, but num_processes is {processes}", cure
