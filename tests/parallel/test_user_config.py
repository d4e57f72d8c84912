"""A user's own config of ``accelerate launch``, or of DeepSpeed: what it asks for, and what is refused."""

import dataclasses
import itertools
from typing import Any

import pytest

from autotrain_mem.parallel.config import accelerate_config, read_deepspeed
from autotrain_mem.parallel.launch_environment import (
    FSDP_KEYS,
    config_of_environment,
    fsdp_settings,
    launch_environment,
)
from autotrain_mem.parallel.user_config import KEYS, Launch, read_launch
from autotrain_mem.settings.own import SHARDINGS
from autotrain_mem.support.errors import UsageError
from tests.nouns import TRL_DEFAULTS


def fsdp(**settings: Any) -> dict[str, Any]:
    given = {f"fsdp_{name}": value for name, value in settings.items()}
    return {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16", "fsdp_config": given}


def zero() -> dict[str, Any]:
    return {"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": {"zero_stage": 3}}


def sizes(**values: int) -> dict[str, Any]:
    return {"parallelism_config": {f"parallelism_config_{name}": value for name, value in values.items()}}


def launch(config: dict[str, Any]) -> Launch:
    return read_launch(config, "a.yaml")


SHARDED = [each for each in SHARDINGS if "sdp" in each]  # DeepSpeed reads a file of its own


WAYS = [(sharding, offload, 1) for sharding, offload in itertools.product(SHARDED, (False, True))]


@pytest.mark.parametrize(("sharding", "offload", "shares"), [("ddp", False, 1), *WAYS, ("fsdp2", False, 2)])
def test_a_file_that_we_write_is_read_as_what_it_was_written_for(sharding: Any, offload: bool, shares: int) -> None:
    knobs = dataclasses.replace(
        TRL_DEFAULTS,
        processes=8,
        sharding=sharding,
        dp_replicate_size=2 if sharding == "hsdp" else None,
        fsdp_offload_params=offload,
        cp_size=shares,
    )
    config = accelerate_config(knobs, mixed_precision="bf16", nodes=2)
    read = launch(config)
    assert read.cp_size == shares
    assert (read.processes, read.nodes, read.sharding) == (8, 2, sharding)
    assert (read.dp_replicate_size, read.fsdp_offload_params) == (knobs.dp_replicate_size, offload)
    assert (read.mixed_precision, read.recomputes, read.warnings) == ("bf16", False, ())
    of_process = config_of_environment(launch_environment(config), 8)  # what a drop-in trainer finds
    assert dataclasses.replace(launch(of_process), nodes=2) == read


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"distributed_type": "NO"}, {"processes": 1, "sharding": None, "mixed_precision": "no"}),
        ({"distributed_type": False, "gpu_ids": "0", "mixed_precision": False}, {"processes": 1, "sharding": None}),
        ({"distributed_type": "MULTI_GPU", "num_processes": 2, "gpu_ids": "all"}, {"sharding": "ddp"}),
        ({"distributed_type": "MULTI_GPU", "num_processes": -1}, {"processes": None, "sharding": "ddp"}),
        (fsdp(version=2, offload_params="true"), {"sharding": "fsdp2", "fsdp_offload_params": True}),
        (fsdp(version=2, activation_checkpointing=True), {"sharding": "fsdp2", "recomputes": True}),
        (fsdp(version="2", reshard_after_forward="false"), {"sharding": "fsdp2-no-reshard"}),
        (fsdp(version=2) | sizes(dp_shard_size=8), {"sharding": "fsdp2", "dp_replicate_size": None}),
        (fsdp(version=2) | sizes(dp_shard_size=2, cp_size=4), {"sharding": "fsdp2", "cp_size": 4}),
        (zero() | sizes(sp_size=4, dp_shard_size=2), {"sharding": "zero3", "sp_size": 4, "sp_attention": "sdpa"}),
        ({"distributed_type": "NO", "fp16": True}, {"mixed_precision": "fp16"}),
    ],
)
def test_a_users_file_is_read(config: dict[str, Any], expected: dict[str, Any]) -> None:
    read = launch(config)
    assert {name: getattr(read, name) for name in expected} == expected


WRAPPED = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


@pytest.mark.parametrize(
    ("settings", "warnings"),
    [
        ({"version": 2, **WRAPPED}, ["FULL_STATE_DICT saves the model"]),
        ({"version": 2, "state_dict_type": "FULL_STATE_DICT", **WRAPPED}, []),
        ({"version": 2, "state_dict_type": "FULL_STATE_DICT"}, ["TRANSFORMER_BASED_WRAP gathers"]),
        (
            {"version": 2, "state_dict_type": "FULL_STATE_DICT", **WRAPPED, "ofload_params": True},
            ["did you mean fsdp_offload_params"],
        ),
    ],
)
def test_what_a_file_leads_to_without_being_wrong_is_said(settings: dict[str, Any], warnings: list[str]) -> None:
    said = launch(fsdp(**settings)).warnings
    assert len(said) == len(warnings)
    assert all(words in text for words, text in zip(warnings, said, strict=True))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ZeRO-0": ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 0}}, "MULTI_GPU is DDP"),
    "NVMe": ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"offload_param_device": "nvme"}}, "cpu"),
    "Megatron": ({"distributed_type": "MEGATRON_LM"}, "fsdp_version: 2"),
    "TPU": ({"distributed_type": "XLA"}, "MULTI_GPU"),
    "another kind": ({"distributed_type": "MULTI_XPU"}, "NO, MULTI_GPU, FSDP or DEEPSPEED"),
    "no kind": ({"num_processes": 2}, "distributed_type: MULTI_GPU"),
    "cloud": ({"distributed_type": "NO", "compute_environment": "AMAZON_SAGEMAKER"}, "LOCAL_MACHINE"),
    "fp8": ({"distributed_type": "NO", "mixed_precision": "fp8"}, "mixed_precision: bf16"),
    "a precision": ({"distributed_type": "NO", "mixed_precision": "bf17"}, "no, bf16 or fp16"),
    "CPU": ({"distributed_type": "NO", "use_cpu": True}, "--use_cpu"),
    "compiled": ({"distributed_type": "NO", "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "--torch_compile"),
    "context of too many": (fsdp(version=2) | sizes(cp_size=2), "num_processes: 2"),
    "context of DDP": ({"distributed_type": "MULTI_GPU", "num_processes": 2} | sizes(cp_size=2), "fsdp_version: 2"),
    "context of copies": (fsdp(version=2) | sizes(cp_size=2, dp_shard_size=2, dp_replicate_size=2), "cp_size: 1"),
    "sequence under FSDP": (fsdp(version=2) | sizes(sp_size=2, dp_shard_size=4), "parallelism_config_cp_size: 2"),
    "tensor": (fsdp(version=2) | sizes(tp_size=8), "parallelism_config_tp_size: 1"),
    "sequence of too many": (zero() | sizes(sp_size=3), "num_processes: 3"),
    "sequence that is counted wrong": (zero() | sizes(sp_size=2), "parallelism_config_dp_shard_size: 4"),
    "context of ZeRO": (zero() | sizes(cp_size=2, dp_shard_size=4), "parallelism_config_sp_size: 2"),
    "sizes of ZeRO": (zero() | sizes(dp_shard_size=8), "Remove parallelism_config"),
    "sizes of DDP": ({"distributed_type": "MULTI_GPU", "num_processes": 2} | sizes(dp_shard_size=2), "fsdp_version: 2"),
    "sizes of too many": (fsdp(version=2) | sizes(dp_replicate_size=2, dp_shard_size=8), "num_processes: 16"),
    "nothing to shard": (fsdp(version=2) | sizes(dp_replicate_size=8), "dp_shard_size"),
    "a key": ({"distributed_type": "NO", "num_proceses": 2}, "num_processes"),
    "one process": (fsdp(version=2) | {"num_processes": 1}, "2 or more"),
    "NO with many": ({"distributed_type": "NO", "num_processes": 4}, "MULTI_GPU"),
    "a number": ({"distributed_type": "MULTI_GPU", "num_processes": "four"}, "1 or more"),
    "machines": (fsdp(version=2) | {"num_machines": 3}, "24 are 8 on each of 3"),
    "chosen GPUs": (
        {"distributed_type": "MULTI_GPU", "num_processes": 2, "gpu_ids": "2,3"},
        "CUDA_VISIBLE_DEVICES=2,3",
    ),
    "a version": (fsdp(version=3), "fsdp_version: 2"),
    "the first version": (fsdp(), "accelerate to-fsdp2 --config_file FILE"),
    "the first version's word": (fsdp(version=2, reshard_after_forward="FULL_SHARD"), "true for FULL_SHARD"),
    "a policy": (fsdp(version=2, auto_wrap_policy="WRAP_IT"), "TRANSFORMER_BASED_WRAP"),
    "activations on the host": (
        fsdp(version=2, activation_checkpointing=True, activation_checkpointing_offload=True),
        "fsdp_activation_checkpointing works",
    ),
    "no weights": (fsdp(version=2, sync_module_states=False), "fsdp_sync_module_states: true"),
    "no block": ({"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": 3}, "indented keys"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused_with_what_can(name: str) -> None:
    config, cure = REFUSED[name]
    with pytest.raises(UsageError) as error:
        launch(config)
    assert "a.yaml" in error.value.message
    assert cure in error.value.hint


@pytest.mark.newest
def test_the_keys_are_accelerates() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    assert {field.name for field in dataclasses.fields(ClusterConfig)} == KEYS
    flags = [action.dest for action in launch_command_parser()._actions if action.dest.startswith("fsdp_")]
    assert FSDP_KEYS - {"ignored_modules"} == fsdp_settings({"fsdp_config": dict.fromkeys(flags)}).keys()


def of_stage(stage: int = 2, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


NVME = {"device": "nvme", "nvme_path": "/disk"}


def test_a_stage_and_its_offload_are_read() -> None:
    found = read_deepspeed(of_stage(3, offload_optimizer=NVME, offload_param={"device": "none"}), "ds.json")
    assert (found.sharding, found.offload_optimizer_device, found.offload_param_device) == ("zero3", "nvme", None)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (of_stage(0), "stage is not 1, 2 or 3"),
        (of_stage() | {"optimizer": {"type": "AdamW"}}, "--optim makes the optimizer"),
        (of_stage(3, zero_quantized_weights=True), "ZeRO"),
        (of_stage(2, offload_optimizer=NVME), "offload_optimizer to NVMe is of stage 3"),
        (of_stage(3, offload_param={"device": "nvme"}), "offload_param has no nvme_path"),
        (of_stage(3, offload_optimizer=NVME | {"buffer_count": 3}), "buffer_count 3 is too few"),
        (of_stage(3, offload_optimizer=NVME) | {"aio": {"use_gds": True}}, "GPUDirect Storage"),
        (of_stage() | {"fp16": {"enabled": True}}, "fp16"),
        (of_stage() | {"tensor_parallel": {"autotp_size": 2}}, "tensor parallelism"),
    ],
)
def test_what_is_not_rehearsed_is_refused_by_name(config: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=f"^ds.json cannot be planned with: .*{why}"):
        read_deepspeed(config, "ds.json")
