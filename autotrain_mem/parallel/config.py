"""The config of ``accelerate launch`` that settings ask for.

Keys are the fields of ``accelerate/commands/config/config_args.py: ClusterConfig``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotrain_mem.parallel.deepspeed_config import deepspeed_config
from autotrain_mem.types import Knobs

CP_COMM_STRATEGY = "alltoall"
"""Keys and values go around one share at a time. accelerate's default, ``allgather``, has those of all processes in
memory at once (``torch/distributed/tensor/experimental/_context_parallel/_attention.py: _AllGatherRotater``)."""

RESHARDS = {"fsdp2-no-reshard": False, "fsdp2": True, "hsdp": True}


def accelerate_config(
    knobs: Knobs,
    *,
    mixed_precision: str = "no",
    nodes: int = 1,
    wrapped: Sequence[str] = (),
    attention: str | None = None,
) -> dict[str, Any]:
    """Writes the config's keys for these settings, but for whose machine and port it is.

    Args:
        mixed_precision: What the trainer's config comes to: ``bf16``, ``fp16`` or ``no``. It must be said: where the
            trainer's config says neither, what stands here counts (``transformers/training_args.py: __post_init__``).
        wrapped: Classes of the layers to shard, where the model's own names of them are not all to be found in it.
        attention: ``attn_implementation``, which DeepSpeed's sequence parallelism goes around
            (``deepspeed/runtime/sequence_parallel/ulysses_sp.py: register_with_transformers``); None for the model's.
    """
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(knobs),
        "mixed_precision": mixed_precision,
        "num_machines": nodes,
        "num_processes": knobs.processes,
    }
    if config["distributed_type"] == "FSDP":
        config["fsdp_config"] = _fsdp(knobs) | (
            {"fsdp_transformer_layer_cls_to_wrap": ",".join(wrapped)} if wrapped else {}
        )
    if knobs.sharding == "hsdp" or knobs.token_shards > 1:
        config["parallelism_config"] = _parallelism(knobs, attention)
    return config


def _parallelism(knobs: Knobs, attention: str | None) -> dict[str, Any]:
    """Writes the sizes of accelerate's mesh; a model is divided among all that share its tokens, too
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


def _distributed_type(knobs: Knobs) -> str:
    if knobs.zero_stage:
        return "DEEPSPEED"
    return "FSDP" if knobs.is_sharded else "MULTI_GPU" if knobs.processes > 1 else "NO"


def _fsdp(knobs: Knobs) -> dict[str, Any]:
    """Writes the keys of either version.

    The first goes by ``fsdp_sharding_strategy``, which accelerate always says to it, and is not asked about resharding
    (``accelerate/utils/dataclasses.py: FullyShardedDataParallelPlugin.__post_init__``).
    """
    version: dict[str, Any] = {"fsdp_version": 2, "fsdp_reshard_after_forward": RESHARDS.get(str(knobs.sharding))}
    if knobs.sharding == "fsdp1":
        version = {
            "fsdp_version": 1,
            "fsdp_sharding_strategy": "FULL_SHARD",
            # torch's default; accelerate's is none at all.
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_use_orig_params": True,
            "fsdp_sync_module_states": True,
        }
    return version | {
        "fsdp_offload_params": knobs.fsdp_offload_params,
        # The layers that transformers names (``_no_split_modules``).
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        # A trainer saves no model from a sharded one (``transformers/trainer.py: save_model``).
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        # All processes begin with rank 0's weights, also with those of a new head.
        "fsdp_cpu_ram_efficient_loading": True,
        # The model's own recomputes: transformers refuses both (``trainer.py: create_accelerator_and_postprocess``).
        "fsdp_activation_checkpointing": False,
    }


def sharding_arguments(knobs: Knobs) -> dict[str, Any]:
    """Say what a trainer needs beside accelerate's config where its model is sharded; the user's own words go over it.

    FSDP shards floating-point parameters only, so 4-bit weights are packed into those of the dtype that is computed in,
    as which they are gathered (``transformers/distributed/fsdp.py: update_fsdp_plugin_peft``). Stored as bytes each
    process would hold them whole (``accelerate/utils/fsdp_utils.py: fsdp2_prepare_model``). And unless each micro-step
    reduces its gradients, each process holds whole ones until the last (``accelerate/accelerator.py: no_sync``): more
    than its shards of all else, and more with fewer rows at once.

    Rows are cut into two parts for each process that shares their tokens, an early and a late one, so that all have as
    much to attend to (``torch/distributed/tensor/experimental/_context_parallel/_load_balancer.py:
    _HeadTailLoadBalancer``). DeepSpeed cuts them into one part for each, and refuses others
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
