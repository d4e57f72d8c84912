"""Several processes train on one plan: that of rank 0, for the smallest of their devices."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotrain_mem.support import codec
from autotrain_mem.types import Plan
from autotrain_mem.worker import server
from tests.forked import Forge

SCRIPT = """
import contextlib, json, sys

import trl
from datasets import Dataset

from autotrain_mem import AutoFit, DoesNotFitError, SFTTrainer, UsageError
from autotrain_mem.drop_in import call_plan as planning
from autotrain_mem.drop_in import launched
from autotrain_mem.machine.catalog import named
from autotrain_mem.support import codec

model, folder = sys.argv[1:]
make, shared = planning.Workers, []


def workers():
    shared.append(shared[0] if shared else make(1))
    return contextlib.nullcontext(shared[0])


planning.Workers = workers
rows = Dataset.from_dict({"text": [f"row {index} of some more words" for index in range(24)]})
args = trl.SFTConfig(
    folder, use_cpu=True, report_to="none", max_length=64, max_steps=2, save_strategy="no", disable_tqdm=True,
    gradient_checkpointing=False, optim="adamw_torch", per_device_train_batch_size=2, ddp_backend="gloo",
)
trainer = SFTTrainer(model, args=args, train_dataset=rows, autofit=AutoFit(gpu="80MiB", fit="lossless"))
trainer.train()
said = {"steps": trainer.state.global_step, "planned": len(shared), "plan": codec.to_json(trainer.plan)}
said |= {"processes": trainer.accelerator.num_processes}
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


def two_ranks(code: str, model: Path, folder: Path, forge: Forge) -> tuple[list[dict[str, Any]], str]:
    """Runs a script as torchrun starts it; what each rank wrote, and what both printed."""
    script, log = folder / "script.py", folder / "log"
    script.write_text(code, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with forge.commands(sys.modules[__name__]), open(log, "w") as err:
        started = []
        for rank in ("0", "1"):
            group = {**address, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
            command = [sys.executable, str(script), str(model), str(folder)]
            started.append(subprocess.Popen(command, stdout=err, stderr=err, env={**os.environ, **group}))
        codes = [each.wait(240) for each in started]  # a rank that waits for another for ever is a failure too
    printed = log.read_text(encoding="utf-8")
    assert codes == [0, 0], printed[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)], printed


@pytest.mark.slow
def test_every_rank_acts_on_the_plan_of_rank_0(tiny_qwen: Path, tmp_path: Path, forge: Forge) -> None:
    (first, second), printed = two_ranks(SCRIPT, tiny_qwen, tmp_path, forge)
    assert (first.pop("planned"), second.pop("planned")) == (1, 0)
    ended = "AutofitError: Rank 0 ended while it planned"
    assert (first.pop("KeyboardInterrupt"), first.pop("ValueError")) == ("KeyboardInterrupt: ", "ValueError: of TRL's")
    assert second.pop("KeyboardInterrupt") == f"{ended}: KeyboardInterrupt: "
    assert second.pop("ValueError") == f"{ended}: ValueError: of TRL's"
    assert first == second
    assert first["smallest"] == ["rtx3060", "rtx3060"]
    assert "sees 2 GPUs" in first["refused"], "a device that one rank cannot have is refused by all"
    assert first["DoesNotFitError"] == "DoesNotFitError: It does not fit.\n  --use_peft"
    assert (first["steps"], first["processes"]) == (2, 2)
    assert printed.count("fits 80MiB") == 1
    plan = codec.from_json(Plan, first["plan"])
    assert (plan.knobs.processes, plan.knobs.sharding, plan.knobs.effective_batch_size) == (2, "ddp", 4)
    assert plan.estimate.hardware.topology.devices == 2


UNDER_DEEPSPEED = """
import json, os, sys

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import trl
from datasets import Dataset

from autotrain_mem import AutoFit, SFTTrainer

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would compile what CPUs reduce with
model, folder = sys.argv[1:]
rows = Dataset.from_dict({"text": [f"row {index} of some more words" for index in range(24)]})
zero = {"stage": 2, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
args = trl.SFTConfig(
    folder, use_cpu=True, bf16=False, report_to="none", max_length=64, max_steps=2, save_strategy="no",
    disable_tqdm=True, optim="adamw_torch", per_device_train_batch_size=2, gradient_checkpointing=False,
    ddp_backend="gloo", deepspeed={"zero_optimization": zero, "zero_allow_untested_optimizer": True, **auto},
)
trainer = SFTTrainer(model, args=args, train_dataset=rows, autofit=AutoFit(gpu="1GiB", fit="lossless"))
trainer.train()
knobs, engine = trainer.plan.knobs, trainer.model_wrapped
said = {"engine": type(engine).__name__, "stage": engine.zero_optimization_stage(), "planned": knobs.sharding}
said |= {"steps": trainer.state.global_step, "rows": engine.train_batch_size(), "of_plan": knobs.effective_batch_size}
with open(f"{folder}/{args.process_index}.json", "w") as file:
    json.dump(said, file)
"""


@pytest.mark.slow
def test_ranks_are_planned_and_train_as_deepspeed_divides_them(tiny_qwen: Path, tmp_path: Path, forge: Forge) -> None:
    (first, second), printed = two_ranks(UNDER_DEEPSPEED, tiny_qwen, tmp_path, forge)
    assert first == second
    assert (first["engine"], first["stage"], first["planned"]) == ("DeepSpeedEngine", 2, "zero2")
    assert (first["steps"], first["rows"], first["of_plan"]) == (2, 4, 4)
    assert printed.count("ZeRO-2), a process on each") == 1


def test_a_rehearsal_joins_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """It inherits the environment of a process that torchrun started."""
    of_group = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE")
    of_group += (
        "ACCELERATE_DEEPSPEED_CONFIG_FILE",
        "ACCELERATE_GRADIENT_CLIPPING",
        "ACCELERATE_USE_FSDP",
        "FSDP_VERSION",
        "PARALLELISM_CONFIG_TP_SIZE",
    )
    for name in of_group:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANKING", "mine")
    server.leave_group()
    assert not [name for name in of_group if name in os.environ]
    assert os.environ["RANKING"] == "mine"
