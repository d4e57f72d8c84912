"""What a run cannot go on with is refused before anything is imported or planned."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotrain_mem import api
from autotrain_mem.run.early import refuse
from autotrain_mem.support.errors import OutputFolderError, UsageError
from autotrain_mem.training.checkpoints import write_manifest
from autotrain_mem.types.autofit import AutoFit
from tests.planning.test_for_processes import made


def checkpoint(folder: Path, step: int, *names: str, ranks: int = 2) -> None:
    for name in ("trainer_state.json", "scheduler.pt", *names, *(f"rng_state_{rank}.pth" for rank in range(ranks))):
        file = folder / f"checkpoint-{step}" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"global_step": 3}' if name == "trainer_state.json" else "")
    (folder / f"checkpoint-{step}/autofit.checkpoint.json").write_text('{"run": "", "files": {}}')


def wish(folder: Path, autofit: AutoFit, value: Any = True, **more: Any) -> api.Wish:
    config = {"output_dir": str(folder), "resume_from_checkpoint": value}
    return api.Wish(method="sft", config=config, autofit=autofit, **more)


ZERO = "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt"


def test_ranks_that_cannot_read_it_are_refused_within_a_second(tmp_path: Path) -> None:
    made(2).save(tmp_path / "plan.json")
    checkpoint(tmp_path, 3, ZERO)
    started = time.monotonic()
    with pytest.raises(OutputFolderError, match="it is DeepSpeed's ZeRO-3 of 2 ranks") as refused:
        refuse(wish(tmp_path, AutoFit(gpus=4, sharding="fsdp2")), to_train=True)
    assert time.monotonic() - started < 1
    assert "--gpus 2 --sharding zero3" in refused.value.hint
    with pytest.raises(OutputFolderError, match="ZeRO-3"):
        refuse(wish(tmp_path, AutoFit(sharding="fsdp2"), str(tmp_path / "checkpoint-3")), to_train=True)
    refuse(wish(tmp_path, AutoFit(sharding="zero3")), to_train=True)


def test_another_seed_is_refused_before_anything_is_planned_unless_the_epoch_begins_anew(tmp_path: Path) -> None:
    for step, seed in ((3, "7"), (6, "42")):
        checkpoint(tmp_path, step, "optimizer.pt")
        write_manifest(tmp_path / f"checkpoint-{step}", {}, "", {"--seed": seed, "--dataset": "of 13 rows"})
    with pytest.raises(OutputFolderError, match=r"checkpoint-6 was trained .*: --seed 42 in the checkpoint, 7 now"):
        refuse(wish(tmp_path, AutoFit(), argv=("--seed", "7")), to_train=True)
    refuse(wish(tmp_path, AutoFit(), argv=("--seed=42", "--data_seed", "1")), to_train=True)
    refuse(wish(tmp_path, AutoFit(), argv=("--seed", "7", "--ignore_data_skip")), to_train=True)


def test_a_checkpoint_that_may_still_be_meant_refuses_nothing(tmp_path: Path) -> None:
    made(2).save(tmp_path / "plan.json")
    checkpoint(tmp_path, 3, "optimizer.pt")
    checkpoint(tmp_path, 6, ZERO)
    refuse(wish(tmp_path, AutoFit(gpus=4, sharding="ddp")), to_train=True)
    checkpoint(tmp_path, 9, "pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata")
    refuse(wish(tmp_path, AutoFit(gpus=4, sharding="fsdp2")), to_train=True)


def test_gpus_that_do_not_divide_the_batch_are_refused_with_those_that_do(tmp_path: Path) -> None:
    plan = made(2)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(UsageError, match="3 GPUs do not divide the run's effective batch of 16 rows") as refused:
        refuse(wish(tmp_path, AutoFit(gpus=3)), to_train=True)
    assert "--gpus 2 or 4" in refused.value.hint
    with pytest.raises(UsageError, match="3 GPUs"):
        refuse(replace(wish(tmp_path / "elsewhere", AutoFit(gpus=3)), plan=plan), to_train=True)


def test_without_a_plan_only_what_is_sure_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3, ZERO)
    refuse(wish(tmp_path, AutoFit()), to_train=True)  # as many GPUs as are here, shared as fits
    with pytest.raises(OutputFolderError, match="DeepSpeed resumes it with that stage"):
        refuse(wish(tmp_path, AutoFit(gpus=2, sharding="fsdp2")), to_train=True)
