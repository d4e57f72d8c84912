"""What processes are told is what ``accelerate launch`` tells them."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotrain_mem.parallel.config import accelerate_config
from autotrain_mem.parallel.launch_environment import config_of_environment, launch_environment
from autotrain_mem.settings.own import SHARDINGS
from tests.nouns import TRL_DEFAULTS

OURS = {
    f"{sharding} {precision} {'offload' * offload}": accelerate_config(
        dataclasses.replace(
            TRL_DEFAULTS,
            processes=8,
            sharding=sharding,
            dp_replicate_size=2 if sharding == "hsdp" else None,
            fsdp_offload_params=offload,
        ),
        mixed_precision=precision,
        wrapped=("OneLayer", "OtherLayer") if offload else (),
    )
    for sharding, precision, offload in itertools.product(SHARDINGS, ("no", "bf16", "fp16"), (False, True))
    if not (sharding == "ddp" and offload) and not sharding.startswith("zero")  # accelerate has DeepSpeed launch these
}
OURS["shared tokens"] = accelerate_config(
    dataclasses.replace(TRL_DEFAULTS, processes=8, sharding="fsdp2", cp_size=4), mixed_precision="bf16"
)
SEQUENCE = accelerate_config(
    dataclasses.replace(TRL_DEFAULTS, processes=8, sharding="zero3", sp_size=4), attention="flash_attention_2"
)
FSDP = {"distributed_type": "FSDP", "num_processes": 2, "num_machines": 1}
USERS: dict[str, dict[str, Any]] = {
    "nothing said of FSDP": FSDP,
    "keys without their prefix": FSDP
    | {
        "mixed_precision": "BF16",
        "fsdp_config": {"version": 2, "reshard_after_forward": False, "min_num_params": 2000},
    },
    "null": FSDP | {"fsdp_config": {"fsdp_state_dict_type": None, "fsdp_offload_params": None}},
    "all kinds of parallelism": FSDP
    | {"fsdp_config": {"fsdp_version": 2}, "parallelism_config": {"parallelism_config_tp_size": 2}},
    "text for what is true": FSDP
    | {"fsdp_config": {"fsdp_offload_params": "True", "fsdp_activation_checkpointing": "false"}},
    "DDP": {"distributed_type": "MULTI_GPU", "num_processes": 4, "num_machines": 2, "main_process_ip": "10.0.0.1"},
}


def of_accelerate(config: dict[str, Any], path: Path) -> dict[str, str]:
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    args = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    environment = prepare_multi_gpu_env(launch._validate_launch_command(args)[0])
    return {name: value for name, value in environment.items() if name.startswith(prefixes) and "DYNAMO" not in name}


@pytest.mark.newest
def test_a_process_is_told_what_accelerate_would_tell_it(tmp_path: Path) -> None:
    for name, config in (OURS | USERS).items():
        said = launch_environment(config)
        assert said == of_accelerate(config, tmp_path / "accelerate.yaml"), name
        read = config_of_environment(said, config["num_processes"])
        assert launch_environment(read) == said, name
        assert (read["distributed_type"] == "FSDP") == (config["distributed_type"] == "FSDP"), name


@pytest.mark.newest
@pytest.mark.parametrize("sharding", ["fsdp2", "fsdp2-no-reshard", "hsdp"])
def test_accelerate_understands_it_as_it_is_meant(sharding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    for variable, value in launch_environment(OURS[f"{sharding} bf16 offload"]).items():
        monkeypatch.setenv(variable, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.reshard_after_forward is (sharding != "fsdp2-no-reshard")
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert plugin.transformer_cls_names_to_wrap == ["OneLayer", "OtherLayer"]
    assert not plugin.activation_checkpointing
    sizes = ParallelismConfig()
    replicas, shards = (2, 4) if sharding == "hsdp" else (1, 1)
    assert (sizes.dp_replicate_size, sizes.dp_shard_size) == (replicas, shards)


@pytest.mark.newest
def test_deepspeed_is_told_who_shares_rows_as_accelerate_would(tmp_path: Path) -> None:
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(SEQUENCE | {"deepspeed_config": {"zero_stage": 3}}), encoding="utf-8")
    args = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args = launch._validate_launch_command(args)[0]
    args.deepspeed_fields_from_accelerate_config = ""  # as ``launch_command`` sets it
    _, environment = prepare_deepspeed_cmd_env(args)
    said = {name: value for name, value in launch_environment(SEQUENCE).items() if name.startswith("PARALLELISM")}
    assert said == {name: value for name, value in environment.items() if name.startswith("PARALLELISM")}
    assert said["PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"] == "flash_attention_2"
