"""Several processes train on one plan: that of rank 0, for the smallest of their devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from autotrain_mem.drop_in import ranks
from autotrain_mem.errors import AutofitError, DoesNotFitError, UsageError
from autotrain_mem.machine.catalog import named
from autotrain_mem.spec import Plan, codec
from autotrain_mem.worker import server
from tests.spec.test_nouns import PLAN

SCRIPT = """
import contextlib, json, os, sys

import trl
from datasets import Dataset

from autotrain_mem import AutoFit, SFTTrainer
from autotrain_mem.drop_in import plan as planning
from autotrain_mem.errors import DoesNotFitError
from autotrain_mem.spec import codec

model, folder = sys.argv[1:]
make, shared = planning.Workers, []


def workers():
    shared.append(shared[0] if shared else make(1))
    return contextlib.nullcontext(shared[0])


planning.Workers = workers
rows = Dataset.from_dict({"text": [f"row {index} of some more words" for index in range(24)]})
args = trl.SFTConfig(
    folder, use_cpu=True, report_to="none", max_length=64, max_steps=2, save_strategy="no", disable_tqdm=True
)
said = {"told": [], "rank": args.process_index}
for gpu in ("6MiB", "80MiB"):
    try:
        trainer = SFTTrainer(model, args=args, train_dataset=rows, autofit=AutoFit(gpu=gpu, fit="lossless"))
    except DoesNotFitError as error:
        said["refused"] = error.message
trainer.train()
said |= {"steps": trainer.state.global_step, "planned": len(shared), "plan": codec.to_json(trainer.plan)}
said |= {"processes": trainer.accelerator.num_processes, "checkpointing": trainer.args.gradient_checkpointing}
with open(f"{folder}/{args.process_index}.json", "w") as file:
    json.dump(said, file)
for each in shared[:1]:
    each.kill()
"""


@pytest.mark.slow
def test_every_rank_acts_on_the_plan_of_rank_0(tiny_qwen: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*torchrun, str(script), str(tiny_qwen), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,  # a rank that waits for another for ever is a failure too
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    assert first["plan"] == second["plan"]
    assert first["checkpointing"] is second["checkpointing"] is first["plan"]["knobs"]["gradient_checkpointing"]
    assert (first["steps"], second["steps"]) == (2, 2)
    assert (first["processes"], second["processes"]) == (2, 2)
    assert "does not fit 6MiB" in first["refused"]
    assert first["refused"] == second["refused"]
    assert (first["planned"], second["planned"]) == (2, 0)
    assert done.stderr.count("fits 80MiB") == 1
    assert any("2 processes" in warning for warning in codec.from_json(Plan, first["plan"]).warnings)


def test_a_rehearsal_joins_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """It inherits the environment of a process that torchrun started."""
    of_group = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE")
    for name in of_group:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANKING", "mine")
    server.leave_group()
    assert not [name for name in of_group if name in os.environ]
    assert os.environ["RANKING"] == "mine"


# -- a group of two, one process after the other -------------------------------------------------------------------


class Group:
    """As a process of two sees torch.distributed; what rank 0 broadcasts is kept for rank 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = 0
        self.others: Any = None
        self._sent: list[Any] = []
        for name, value in {
            "is_initialized": lambda: True,
            "get_world_size": lambda: 2,
            "get_rank": lambda: self.rank,
            "all_gather_object": self._gather,
            "broadcast_object_list": self._broadcast,
        }.items():
            monkeypatch.setattr(dist, name, value)

    def _gather(self, found: list[Any], own: Any) -> None:
        found[:] = json.loads(json.dumps([own, self.others]))

    def _broadcast(self, box: list[Any], src: int) -> None:
        if self.rank == src:
            self._sent.append(json.dumps(box[0]))
        else:
            box[0] = json.loads(self._sent.pop())


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(monkeypatch)


def forbidden() -> Plan:
    raise AssertionError("only rank 0 plans")


def failing(error: BaseException) -> Callable[[], Any]:
    def make() -> Any:
        raise error

    return make


def test_the_plan_is_for_the_card_with_the_least_budget(group: Group) -> None:
    large, small = named("a100-80gb"), named("rtx3060")
    group.others = codec.to_json(small)
    assert ranks.smallest(lambda: large) == small
    full = replace(large, free_bytes=2**30)  # the same card, which somebody else uses
    group.others = codec.to_json(full)
    assert ranks.smallest(lambda: large) == full
    assert ranks.smallest(lambda: small) == full


def test_a_device_that_one_rank_cannot_have_is_refused_by_all(group: Group) -> None:
    refusal = UsageError("This process sees 2 GPUs.", hint="torchrun")
    group.others = refusal.to_json()
    with pytest.raises(UsageError, match="sees 2 GPUs"):
        ranks.smallest(lambda: named("rtx3060"))
    group.others = codec.to_json(named("rtx3060"))
    with pytest.raises(UsageError, match="sees 2 GPUs"):
        ranks.smallest(failing(refusal))


def test_rank_1_gets_the_plan_of_rank_0_and_makes_none(group: Group) -> None:
    plan = PLAN
    assert ranks.is_first()
    assert ranks.agreed(lambda: plan) is plan
    group.rank = 1
    assert not ranks.is_first()
    assert ranks.agreed(forbidden) == plan


def test_rank_1_raises_what_rank_0_met(group: Group) -> None:
    with pytest.raises(DoesNotFitError):
        ranks.agreed(failing(DoesNotFitError("It does not fit.", hint="--use_peft")))
    group.rank = 1
    with pytest.raises(DoesNotFitError) as caught:
        ranks.agreed(forbidden)
    assert (caught.value.message, caught.value.hint) == ("It does not fit.", "--use_peft")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("of TRL's")])
def test_whatever_ends_the_planning_is_told_to_rank_1(group: Group, error: BaseException) -> None:
    with pytest.raises(type(error)):
        ranks.agreed(failing(error))
    group.rank = 1
    with pytest.raises(AutofitError, match=f"Rank 0 ended while it planned: {type(error).__name__}"):
        ranks.agreed(forbidden)


def test_one_process_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_gather_object", "broadcast_object_list"):
        monkeypatch.setattr(dist, name, failing(AssertionError("nobody is there")))
    plan, card = PLAN, named("rtx3060")
    assert ranks.processes() == 1
    assert ranks.is_first()
    assert ranks.smallest(lambda: card) is card
    assert ranks.agreed(lambda: plan) is plan
