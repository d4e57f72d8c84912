"""How a launcher started this training's processes is read from their environment and the script's config; they train
on one plan, that of rank 0, for the smallest of their devices, and for what each may still take of its own (with a
stand-in for torch.cuda)."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from accelerate.utils import DeepSpeedPlugin

from autotrain_mem import AutoFit
from autotrain_mem.drop_in import device, launched
from autotrain_mem.drop_in.config_merge import given_arguments
from autotrain_mem.drop_in.device import device_of, why_fixed, with_own_use
from autotrain_mem.drop_in.launched import Launched, read_launched
from autotrain_mem.machine.catalog import named
from autotrain_mem.parallel.launch_environment import launch_environment
from autotrain_mem.support import codec
from autotrain_mem.support.errors import UnknownGpuError, UsageError
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import Hardware, Plan
from autotrain_mem.worker import server
from tests.forked import Forge

FSDP = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}}
SIZES = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
HSDP = FSDP | {"parallelism_config": SIZES}


def started(
    monkeypatch: pytest.MonkeyPatch, config: Any = None, *, processes: int = 8, args: Any = None, **words: Any
) -> Launched:
    monkeypatch.setattr(launched, "processes", lambda: processes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(4, processes)))
    for variable, value in launch_environment(config or {}).items():
        monkeypatch.setenv(variable, value)
    return read_launched(args or SimpleNamespace(), AutoFit(**words))


def test_a_single_process_is_launched_by_nobody_and_torchrun_is_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, processes=1) == Launched()
    read = started(monkeypatch, {"mixed_precision": "bf16"})
    assert (read.processes, read.nodes, read.pins) == (8, 2, {"sharding": "ddp", "fsdp_offload_params": False})
    assert {"mixed_precision": "bf16", "num_machines": 2}.items() <= (read.config or {}).items()


@pytest.mark.parametrize(
    ("config", "pins"),
    [
        (FSDP, {"sharding": "fsdp2", "fsdp_offload_params": True}),
        (HSDP, {"sharding": "hsdp", "fsdp_offload_params": True, "dp_replicate_size": 2}),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}},
            {"sharding": "fsdp2", "fsdp_offload_params": False, "gradient_checkpointing": False},
        ),
    ],
)
def test_what_accelerate_launch_said_is_pinned(monkeypatch: pytest.MonkeyPatch, config: Any, pins: Any) -> None:
    read = started(monkeypatch, config)
    assert read.pins == pins
    assert launch_environment(read.config or {}) == launch_environment(config)


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


ZERO = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
DIVIDED = {"offload_optimizer_device": None, "offload_param_device": None, "fsdp_offload_params": False}


def of_script(deepspeed: Any = None) -> Any:
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    return SimpleNamespace(deepspeed=deepspeed, **sizes)


@pytest.mark.parametrize("form", ["keys", "json", "file"])
def test_the_scripts_own_deepspeed_is_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ZERO), encoding="utf-8")
    given = {"keys": ZERO, "json": json.dumps(ZERO), "file": str(tmp_path / "ds.json")}[form]
    read = started(monkeypatch, args=of_script(given))
    assert (read.processes, read.nodes, read.config) == (8, 2, None)
    filled = ZERO | {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    assert read.pins == DIVIDED | {"sharding": "zero2", "deepspeed": filled}


def test_accelerates_deepspeed_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``accelerate launch`` says of it (``accelerate/utils/launch.py: prepare_deepspeed_cmd_env``)."""
    said = {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": "3", "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}
    for name, value in {**said, "GRADIENT_ACCUMULATION_STEPS": "2"}.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    args = of_script()
    args.deepspeed_plugin = DeepSpeedPlugin()
    read = started(monkeypatch, args=args)
    pins = dict(read.pins)
    content = pins.pop("deepspeed")
    knobs = DIVIDED | {"sharding": "zero3", "offload_param_device": "cpu"}
    assert pins == knobs | {"gradient_accumulation_steps": 2}, "what it says in numbers no plan may change"
    assert (content["zero_optimization"]["stage"], content["gradient_accumulation_steps"]) == (3, "auto")
    assert json.loads(json.dumps(content)) == content
    assert "Infinity" not in json.dumps(content)
    with pytest.raises(UsageError, match=r"AutoFit\(sharding='zero2'\).*zero3.*offload_optimizer_device='cpu'"):
        started(monkeypatch, args=args, sharding="zero2", offload_optimizer_device="cpu")


@pytest.mark.parametrize(
    ("changes", "processes", "said", "cure"),
    [
        ({}, 1, "a single process", "num_processes 2"),
        ({"train_micro_batch_size_per_gpu": 8}, 8, "8 and per_device_train_batch_size=4", '"auto"'),
        ({"train_batch_size": 32}, 8, "32 and the 64 rows", '"auto"'),
        ({"optimizer": {"type": "AdamW"}}, 8, "optimizer: TRL's --optim", "Remove optimizer"),
    ],
)
def test_a_deepspeed_that_cannot_be_is_refused_with_a_cure(
    monkeypatch: pytest.MonkeyPatch, changes: Any, processes: int, said: str, cure: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as error:
        started(monkeypatch, processes=processes, args=of_script({**ZERO, **changes}))
    assert cure in error.value.hint


def test_deepspeed_steps_after_each_micro_batch_where_its_config_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = {"zero_optimization": {"stage": 1}}
    with pytest.raises(UsageError, match="1 and gradient_accumulation_steps=2"):
        started(monkeypatch, args=of_script(silent))
    args = of_script(silent)
    args.gradient_accumulation_steps = 1
    pins = started(monkeypatch, args=args).pins
    assert pins["gradient_accumulation_steps"] == 1
    assert "gradient_clipping" not in pins["deepspeed"], "it clips nothing then"


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
def test_words_for_other_launches_are_refused(monkeypatch: pytest.MonkeyPatch, words: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        started(monkeypatch, **words)
    assert error.value.hint == launched._START
    assert started(monkeypatch, gpus=4, nodes=2, sharding="ddp").processes == 8
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.raises(UsageError, match="Megatron-LM"):
        started(monkeypatch)


SCRIPT = """
import contextlib, json, os, sys

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import trl
from datasets import Dataset

from autotrain_mem import AutoFit, DoesNotFitError, SFTTrainer, UsageError
from autotrain_mem.drop_in import call_plan as planning
from autotrain_mem.drop_in import device, launched
from autotrain_mem.machine.catalog import named
from autotrain_mem.support import codec

model, folder, zero = sys.argv[1:]
make, shared = planning.Workers, []


def workers():
    shared.append(shared[0] if shared else make(1))
    return contextlib.nullcontext(shared[0])


planning.Workers = workers
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would compile what CPUs reduce with
rows = Dataset.from_dict({"text": [f"row {index} of some more words" for index in range(24)]})
args = trl.SFTConfig(
    folder, use_cpu=True, bf16=False, report_to="none", max_length=64, max_steps=2, save_strategy="no",
    disable_tqdm=True, gradient_checkpointing=False, optim="adamw_torch", per_device_train_batch_size=2,
    ddp_backend="gloo", deepspeed=json.loads(zero),
)
trainer = SFTTrainer(model, args=args, train_dataset=rows, autofit=AutoFit(gpu="1GiB", fit="lossless"))
trainer.train()
said = {"steps": trainer.state.global_step, "planned": len(shared), "plan": codec.to_json(trainer.plan)}
said |= {"processes": trainer.accelerator.num_processes, "engine": type(trainer.model_wrapped).__name__}
if args.deepspeed:
    said |= {"stage": trainer.model_wrapped.zero_optimization_stage(), "rows": trainer.model_wrapped.train_batch_size()}
small, large, is_first = named("rtx3060"), named("a100-80gb"), args.process_index == 0


def met(ask, of_first, of_second):
    def make():
        mine = of_first if is_first else of_second
        if isinstance(mine, BaseException):
            raise mine
        return mine

    try:
        return ask(make).name
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


never = AssertionError("only rank 0 plans")
said["smallest"] = [met(launched.smallest, *cards) for cards in ((small, large), (large, small))]
said["refused"] = met(launched.smallest, UsageError("This process sees 2 GPUs."), small)
for error in (DoesNotFitError("It does not fit.", hint="--use_peft"), KeyboardInterrupt(), ValueError("of TRL's")):
    said[type(error).__name__] = met(launched.agreed, error, never)
with open(f"{folder}/{args.process_index}.json", "w") as file:
    json.dump(said, file)
for each in shared[:1]:
    each.kill()
"""
DIVIDES = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000},
    **{"zero_allow_untested_optimizer": True, "train_micro_batch_size_per_gpu": "auto"},
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), "auto"),
}


@pytest.mark.slow
@pytest.mark.parametrize("zero", [None, DIVIDES], ids=["ddp", "zero2"])
def test_every_rank_acts_on_the_plan_of_rank_0(zero: Any, qwen: Path, tmp_path: Path, forge: Forge) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    printed = forge.two_ranks([tmp_path / "script.py", qwen, tmp_path, json.dumps(zero)], tmp_path / "log")
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    assert (first.pop("planned"), second.pop("planned")) == (1, 0)
    ended = "AutofitError: Rank 0 failed while it planned"
    assert (first.pop("KeyboardInterrupt"), first.pop("ValueError")) == ("KeyboardInterrupt: ", "ValueError: of TRL's")
    assert second.pop("KeyboardInterrupt").startswith(f"{ended}: KeyboardInterrupt: raised by ")
    assert second.pop("ValueError") == f"{ended}: ValueError: of TRL's"
    assert first == second
    assert first["smallest"] == ["rtx3060", "rtx3060"]
    assert "sees 2 GPUs" in first["refused"], "a device that one rank cannot have is refused by all"
    assert first["DoesNotFitError"] == "DoesNotFitError: It does not fit.\n  --use_peft"
    assert (first["steps"], first["processes"]) == (2, 2)
    assert printed.count("fits 1GiB") == 1
    plan = codec.from_json(Plan, first["plan"])
    assert (plan.knobs.processes, plan.knobs.effective_batch_size) == (2, 4)
    assert plan.knobs.sharding == ("zero2" if zero else "ddp")
    assert plan.estimate.hardware.topology.devices == 2
    if zero:
        assert printed.count("2 GPUs (ZeRO-2") == 1
        assert (first["engine"], first["stage"], first["rows"]) == ("DeepSpeedEngine", 2, 4)


def test_a_rehearsal_joins_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """It inherits the environment of a process that torchrun started."""
    of_group = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE")
    of_group += ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ACCELERATE_GRADIENT_CLIPPING", "ACCELERATE_USE_FSDP")
    of_group += ("FSDP_VERSION", "PARALLELISM_CONFIG_TP_SIZE")
    for name in of_group:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANKING", "mine")
    server.leave_group()
    assert not [name for name in of_group if name in os.environ]
    assert os.environ["RANKING"] == "mine"


CARD = replace(named("rtx4090"), origin="detected", index=0, free_bytes=20 * GIB)
CUDA = torch.device("cuda", 0)


def config_on(kind: str, index: int | None = None, n_gpu: int = 1) -> Any:
    return SimpleNamespace(device=torch.device(kind, index), n_gpu=n_gpu)


def asked(config: Any, gpu: str | None = None) -> Hardware:
    return device_of(config, gpu, [])


def use_cuda(monkeypatch: pytest.MonkeyPatch, *, allocated_bytes: int, reserved_bytes: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: allocated_bytes)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: reserved_bytes)


def test_without_a_name_it_is_the_device_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    second = replace(CARD, index=1)
    monkeypatch.setattr(device, "cuda_device", (CARD, second).__getitem__)
    assert asked(config_on("cpu")).origin == "cpu"
    assert asked(config_on("cuda", 1)) == second
    assert asked(config_on("cuda")) == CARD
    use_cuda(monkeypatch, allocated_bytes=GIB, reserved_bytes=GIB)
    assert asked(config_on("cuda", 0)).free_bytes == 20 * GIB + CARD.non_torch_bytes  # the tensor that is there stays


def test_a_named_card_counts_wherever_the_trainer_runs() -> None:
    assert asked(config_on("mps"), "rtx3060") == named("rtx3060")
    assert asked(config_on("cpu", n_gpu=2), "80MiB").total_bytes == 80 * MIB
    with pytest.raises(UnknownGpuError):
        asked(config_on("cpu"), "rtx306")


def test_a_device_that_no_plan_is_for_is_refused() -> None:
    with pytest.raises(UsageError, match=r"(?s)A trainer on mps cannot be rehearsed.*AutoFit\(gpu=...\)"):
        asked(config_on("mps"))
    with pytest.raises(UsageError, match=r"(?s)sees 2 GPUs.*CUDA_VISIBLE_DEVICES=0.*torchrun"):
        asked(config_on("cuda", 0, n_gpu=2))


def test_tensors_of_the_models_are_theirs_and_all_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_own_use(CARD, CUDA, []) == CARD, "a card that is not open is nobody's"
    use_cuda(monkeypatch, allocated_bytes=10 * GIB, reserved_bytes=12 * GIB)
    weight, bias = (SimpleNamespace(nbytes=size, device=CUDA) for size in (3 * GIB, 1 * GIB))
    elsewhere = SimpleNamespace(nbytes=5 * GIB, device=torch.device("cpu"))
    models = [  # the weight is shared by both, and a buffer of one of them
        SimpleNamespace(parameters=lambda: [weight, elsewhere], buffers=lambda: [weight]),
        SimpleNamespace(parameters=lambda: [bias, weight], buffers=list),
    ]
    mine_bytes = CARD.non_torch_bytes + 12 * GIB
    room = replace(CARD, free_bytes=2 * GIB)
    assert with_own_use(room, CUDA, models) == replace(room, free_bytes=2 * GIB + mine_bytes - 6 * GIB)
    others = [torch.nn.Linear(4, 4)]
    assert with_own_use(room, CUDA, others) == replace(room, free_bytes=2 * GIB + mine_bytes - 10 * GIB)
    full = replace(CARD, free_bytes=CARD.total_bytes)
    assert with_own_use(full, CUDA, models).free_bytes == CARD.total_bytes


def test_segments_cannot_grow_any_more_once_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_fixed() == ""
    use_cuda(monkeypatch, allocated_bytes=0, reserved_bytes=0)
    assert why_fixed() == ""  # open, but empty
    use_cuda(monkeypatch, allocated_bytes=0, reserved_bytes=2 * MIB)
    assert why_fixed().startswith("expandable_segments: ")
    assert "Set PYTORCH_ALLOC_CONF=expandable_segments:True" in why_fixed()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")  # then torch reads the other no longer
    assert "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in why_fixed()
