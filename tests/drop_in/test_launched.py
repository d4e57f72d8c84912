"""How a launcher started this training's processes is read from their environment and the script's config."""

from types import SimpleNamespace
from typing import Any

import pytest
import trl

from autotrain_mem import AutoFit
from autotrain_mem.drop_in import launched, ranks
from autotrain_mem.drop_in.config_merge import given_arguments
from autotrain_mem.drop_in.launched import Launched, read_launched
from autotrain_mem.errors import UsageError
from autotrain_mem.parallel.environment import launch_environment

DDP = {"sharding": "ddp", "fsdp_offload_params": False}
FSDP = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}}
SIZES = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}


def started(
    monkeypatch: pytest.MonkeyPatch, config: Any = None, *, processes: int = 8, args: Any = None, **words: Any
) -> Launched:
    monkeypatch.setattr(ranks, "processes", lambda: processes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(4, processes)))
    for variable, value in launch_environment(config or {}).items():
        monkeypatch.setenv(variable, value)
    return read_launched(args or SimpleNamespace(), AutoFit(**words))


def test_a_single_process_is_launched_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, processes=1) == Launched()


def test_torchrun_is_ddp_whatever_would_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    read = started(monkeypatch, {"mixed_precision": "bf16"})
    assert (read.processes, read.nodes, read.pins) == (8, 2, DDP)
    assert read.config is not None
    assert (read.config["mixed_precision"], read.config["num_machines"]) == ("bf16", 2)


@pytest.mark.parametrize(
    ("config", "pins"),
    [
        (FSDP, {"sharding": "fsdp2", "fsdp_offload_params": True}),
        (
            FSDP | {"parallelism_config": SIZES},
            {"sharding": "hsdp", "fsdp_offload_params": True, "dp_replicate_size": 2},
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_activation_checkpointing": True}},
            {"sharding": "fsdp1", "fsdp_offload_params": False, "gradient_checkpointing": False},
        ),
    ],
)
def test_what_accelerate_launch_said_is_pinned(monkeypatch: pytest.MonkeyPatch, config: Any, pins: Any) -> None:
    read = started(monkeypatch, config)
    assert read.pins == pins
    assert read.config is not None
    assert launch_environment(read.config) == launch_environment(config)


def test_the_scripts_own_fsdp_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # transformers sets it
    fsdp_config = {"reshard_after_forward": False, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}
    args = trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, fsdp=True, fsdp_config=fsdp_config)
    read = started(monkeypatch, FSDP, args=args)
    assert read.pins == {"sharding": "fsdp2-no-reshard", "fsdp_offload_params": False}
    assert read.config is not None
    assert read.config["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "Qwen2DecoderLayer"
    given = given_arguments({"args": args, "model": "tiny"}, trl.SFTConfig, AutoFit())
    assert not {"fsdp", "fsdp_config"} & given.keys(), "it is said by the launch"


@pytest.mark.parametrize(
    ("variable", "name"), [("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"), ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM")]
)
def test_what_is_not_rehearsed_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, name: str) -> None:
    monkeypatch.setenv(variable, "true")
    with pytest.raises(UsageError, match=name):
        started(monkeypatch)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"gpus": 2}, r"AutoFit\(gpus"),
        ({"nodes": 1}, r"AutoFit\(nodes"),
        ({"sharding": "fsdp2"}, "launched .ddp."),
        ({"fsdp_offload_params": True}, "fsdp_offload_params"),
        ({"accelerate_config": "file.yaml"}, "too late"),
    ],
)
def test_words_for_another_launch_are_refused(monkeypatch: pytest.MonkeyPatch, words: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        started(monkeypatch, **words)
    assert error.value.hint == launched._START
    assert started(monkeypatch, gpus=4, nodes=2, sharding="ddp").processes == 8
