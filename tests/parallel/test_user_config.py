"""A user's own config of ``accelerate launch``, or of DeepSpeed: what it asks for, what is refused, and what
processes are told."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import accelerate
import pytest
import yaml

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
from autotrain_mem.support.versions import version_of
from autotrain_mem.types import Knobs
from tests.nouns import TRL_DEFAULTS

IS_OLD = version_of(accelerate.__version__) < (1, 15)
"""Older versions lack some of these keys, and ignore variables that they do not know."""


def fsdp(**settings: Any) -> dict[str, Any]:
    given = {f"fsdp_{name}": value for name, value in settings.items()}
    return {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16", "fsdp_config": given}


ZERO = {"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": {"zero_stage": 3}}
TWO = {"distributed_type": "MULTI_GPU", "num_processes": 2}


def sizes(**values: int) -> dict[str, Any]:
    return {"parallelism_config": {f"parallelism_config_{name}": value for name, value in values.items()}}


def launch(config: dict[str, Any]) -> Launch:
    return read_launch(config, "a.yaml")


def asked(sharding: Any, offload: bool = False, **more: Any) -> Knobs:
    replicas = 2 if sharding == "hsdp" else None
    kind = {"sharding": sharding, "dp_replicate_size": replicas, "fsdp_offload_params": offload}
    return dataclasses.replace(TRL_DEFAULTS, processes=8, **kind, **more)


SHARDED = [each for each in SHARDINGS if "sdp" in each]  # DeepSpeed reads a file of its own
WAYS = [("ddp", False), *itertools.product(SHARDED, (False, True))]


@pytest.mark.parametrize(("sharding", "offload", "shares"), [*((*way, 1) for way in WAYS), ("fsdp2", False, 2)])
def test_a_file_that_we_write_is_read_as_what_it_was_written_for(sharding: Any, offload: bool, shares: int) -> None:
    knobs = asked(sharding, offload, cp_size=shares)
    config = accelerate_config(knobs, mixed_precision="bf16", nodes=2)
    read = launch(config)
    assert read.cp_size == shares
    assert (read.processes, read.nodes, read.sharding) == (8, 2, sharding)
    assert (read.dp_replicate_size, read.fsdp_offload_params) == (knobs.dp_replicate_size, offload)
    assert (read.mixed_precision, read.recomputes, read.warnings) == ("bf16", False, ())
    of_process = config_of_environment(launch_environment(config), 8)  # what a drop-in trainer finds
    assert dataclasses.replace(launch(of_process), nodes=2) == read


def test_a_users_file_is_read() -> None:
    for config, expected in (
        ({"distributed_type": "NO"}, {"processes": 1, "sharding": None, "mixed_precision": "no"}),
        ({"distributed_type": False, "gpu_ids": "0", "mixed_precision": False}, {"processes": 1, "sharding": None}),
        (TWO | {"gpu_ids": "all"}, {"sharding": "ddp"}),
        ({"distributed_type": "MULTI_GPU", "num_processes": -1}, {"processes": None, "sharding": "ddp"}),
        (fsdp(version=2, offload_params="true"), {"sharding": "fsdp2", "fsdp_offload_params": True}),
        (fsdp(version=2, activation_checkpointing=True), {"sharding": "fsdp2", "recomputes": True}),
        (fsdp(version="2", reshard_after_forward="false"), {"sharding": "fsdp2-no-reshard"}),
        (fsdp(version=2) | sizes(dp_shard_size=8), {"sharding": "fsdp2", "dp_replicate_size": None}),
        (fsdp(version=2) | sizes(dp_shard_size=2, cp_size=4), {"sharding": "fsdp2", "cp_size": 4}),
        (ZERO | sizes(sp_size=4, dp_shard_size=2), {"sharding": "zero3", "sp_size": 4, "sp_attention": "sdpa"}),
        ({"distributed_type": "NO", "fp16": True}, {"mixed_precision": "fp16"}),
    ):
        read = launch(config)
        assert {name: getattr(read, name) for name in expected} == expected, config


WRAPPED = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


def test_what_a_file_leads_to_without_being_wrong_is_said() -> None:
    whole = {"state_dict_type": "FULL_STATE_DICT"}
    assert launch(fsdp(version=2, **whole, **WRAPPED)).warnings == ()
    for settings, words in (
        (WRAPPED, "FULL_STATE_DICT saves the model"),
        (whole, "TRANSFORMER_BASED_WRAP gathers"),
        (whole | WRAPPED | {"ofload_params": True}, "did you mean fsdp_offload_params"),
    ):
        (said,) = launch(fsdp(version=2, **settings)).warnings
        assert words in said
    alone = launch({"distributed_type": "NO", "num_processes": 8})  # as in TRL's accelerate_configs/single_gpu.yaml
    assert (alone.processes, len(alone.warnings)) == (1, 1)


ON_HOST = {"activation_checkpointing": True, "activation_checkpointing_offload": True}
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
    "context of DDP": (TWO | sizes(cp_size=2), "fsdp_version: 2"),
    "context of copies": (fsdp(version=2) | sizes(cp_size=2, dp_shard_size=2, dp_replicate_size=2), "cp_size: 1"),
    "sequence under FSDP": (fsdp(version=2) | sizes(sp_size=2, dp_shard_size=4), "parallelism_config_cp_size: 2"),
    "tensor": (fsdp(version=2) | sizes(tp_size=8), "parallelism_config_tp_size: 1"),
    "sequence of too many": (ZERO | sizes(sp_size=3), "num_processes: 3"),
    "sequence that is counted wrong": (ZERO | sizes(sp_size=2), "parallelism_config_dp_shard_size: 4"),
    "context of ZeRO": (ZERO | sizes(cp_size=2, dp_shard_size=4), "parallelism_config_sp_size: 2"),
    "sizes of ZeRO": (ZERO | sizes(dp_shard_size=8), "Remove parallelism_config"),
    "sizes of DDP": (TWO | sizes(dp_shard_size=2), "fsdp_version: 2"),
    "sizes of too many": (fsdp(version=2) | sizes(dp_replicate_size=2, dp_shard_size=8), "num_processes: 16"),
    "nothing to shard": (fsdp(version=2) | sizes(dp_replicate_size=8), "dp_shard_size"),
    "a key": ({"distributed_type": "NO", "num_proceses": 2}, "num_processes"),
    "one process": (fsdp(version=2) | {"num_processes": 1}, "2 or more"),
    "a number": ({"distributed_type": "MULTI_GPU", "num_processes": "four"}, "1 or more"),
    "machines": (fsdp(version=2) | {"num_machines": 3}, "24 are 8 on each of 3"),
    "chosen GPUs": (TWO | {"gpu_ids": "2,3"}, "CUDA_VISIBLE_DEVICES=2,3"),
    "a version": (fsdp(version=3), "fsdp_version: 2"),
    "the first version": (fsdp(), "accelerate to-fsdp2 --config_file FILE"),
    "the first version's word": (fsdp(version=2, reshard_after_forward="FULL_SHARD"), "true for FULL_SHARD"),
    "a policy": (fsdp(version=2, auto_wrap_policy="WRAP_IT"), "TRANSFORMER_BASED_WRAP"),
    "activations on the host": (fsdp(version=2, **ON_HOST), "fsdp_activation_checkpointing works"),
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

    keys = {field.name for field in dataclasses.fields(ClusterConfig)}
    flags = [action.dest for action in launch_command_parser()._actions if action.dest.startswith("fsdp_")]
    fsdp_keys = fsdp_settings({"fsdp_config": dict.fromkeys(flags)}).keys()
    if IS_OLD:
        assert keys - {"ipex_config"} <= KEYS
        assert fsdp_keys <= FSDP_KEYS
    else:
        assert keys == KEYS
        assert fsdp_keys == FSDP_KEYS - {"ignored_modules"}


def of_stage(stage: int = 2, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


def test_a_stage_and_its_offload_are_read() -> None:
    found = read_deepspeed(
        of_stage(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "none"}), "ds.json"
    )
    assert (found.sharding, found.offload_optimizer_device, found.offload_param_device) == ("zero3", "cpu", None)


def test_what_is_not_rehearsed_is_refused_by_name() -> None:
    for config, why in (
        (of_stage(0), "stage is not 1, 2 or 3"),
        (of_stage() | {"optimizer": {"type": "AdamW"}}, "--optim makes the optimizer"),
        (of_stage(3, zero_quantized_weights=True), "ZeRO"),
        (of_stage(3, offload_param={"device": "nvme"}), "offload_param.device nvme is not supported"),
        (of_stage() | {"fp16": {"enabled": True}}, "fp16"),
        (of_stage() | {"tensor_parallel": {"autotp_size": 2}}, "tensor parallelism"),
    ):
        with pytest.raises(UsageError, match=f"^ds.json cannot be planned with: .*{why}"):
            read_deepspeed(config, "ds.json")


# What processes are told is what ``accelerate launch`` tells them.

OURS = {
    f"{sharding} {precision} {'offload' * offload}": accelerate_config(
        asked(sharding, offload), mixed_precision=precision, wrapped=("OneLayer", "OtherLayer") if offload else ()
    )
    for precision in ("no", "bf16", "fp16")
    for sharding, offload in WAYS
}
OURS["shared tokens"] = accelerate_config(asked("fsdp2", cp_size=4), mixed_precision="bf16")
SEQUENCE = accelerate_config(asked("zero3", sp_size=4), attention="flash_attention_2")
UNPREFIXED = {"version": 2, "reshard_after_forward": False, "min_num_params": 2000}
USERS: dict[str, dict[str, Any]] = {
    "nothing said of FSDP": {"distributed_type": "FSDP", "num_processes": 2, "num_machines": 1},
    "keys without their prefix": fsdp() | {"mixed_precision": "BF16", "fsdp_config": UNPREFIXED},
    "null": fsdp(state_dict_type=None, offload_params=None),
    "all kinds of parallelism": fsdp(version=2) | sizes(tp_size=2),
    "text for what is true": fsdp(offload_params="True", activation_checkpointing="false"),
    "DDP": {"distributed_type": "MULTI_GPU", "num_processes": 4, "num_machines": 2, "main_process_ip": "10.0.0.1"},
}


def arguments_of(config: dict[str, Any], folder: Path) -> Any:
    """What ``accelerate launch`` makes of a file."""
    from accelerate.commands import launch

    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    args = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    return launch._validate_launch_command(args)[0]


def of_accelerate(config: dict[str, Any], folder: Path) -> dict[str, str]:
    from accelerate.utils.launch import prepare_multi_gpu_env

    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    environment = prepare_multi_gpu_env(arguments_of(config, folder))
    return {name: value for name, value in environment.items() if name.startswith(prefixes) and "DYNAMO" not in name}


@pytest.mark.newest
def test_a_process_is_told_what_accelerate_would_tell_it(tmp_path: Path) -> None:
    for name, config in (OURS | USERS).items():
        said = launch_environment(config)
        expected = of_accelerate(config, tmp_path)
        if IS_OLD:
            expected = {key: value.removesuffix(".0") for key, value in expected.items()}
            assert said.items() >= expected.items(), name
        else:
            assert said == expected, name
        read = config_of_environment(said, config["num_processes"])
        assert launch_environment(read) == said, name
        assert (read["distributed_type"] == "FSDP") == (config["distributed_type"] == "FSDP"), name


@pytest.mark.newest
def test_deepspeed_is_told_who_shares_rows_as_accelerate_would(tmp_path: Path) -> None:
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    args = arguments_of(SEQUENCE | {"deepspeed_config": {"zero_stage": 3}}, tmp_path)
    args.deepspeed_fields_from_accelerate_config = ""  # as ``launch_command`` sets it
    _, environment = prepare_deepspeed_cmd_env(args)
    said = {name: value for name, value in launch_environment(SEQUENCE).items() if name.startswith("PARALLELISM")}
    assert said == {name: value for name, value in environment.items() if name.startswith("PARALLELISM")}
    assert said["PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"] == "flash_attention_2"
