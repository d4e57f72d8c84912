"""A plan followed on other GPUs, or with the model shared otherwise: what stays, and what several machines are told."""

from dataclasses import replace
from typing import Any

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem import api
from autotrain_mem.planning import for_processes
from autotrain_mem.planning.plan import NOT_MODELLED, machine_warnings
from autotrain_mem.planning.read_request import with_plan
from autotrain_mem.support.errors import AutofitError
from autotrain_mem.types import Job, Knobs, Plan, Topology
from autotrain_mem.types.autofit import AutoFit
from tests import fake_worker
from tests.fake_worker import FakeWorker
from tests.planning.test_compare_gpus import LARGE

SPLIT = {"max_length": 512, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
JOB = Job(method="sft", model="here/m", dataset=None, arguments=SPLIT)
HINTS: Any = api.PlanHints(other_method="", objects="")


def on_cards(job: Job, gpus: int) -> api.Rehearsals:
    card = replace(LARGE, topology=Topology(devices=gpus))
    return fake_worker.rehearsals(FakeWorker(longest=300), job, card).on(card)


def made(gpus: int = 2, **more: Any) -> Plan:
    return api.plan(on_cards(replace(JOB, **more), gpus))


def followed(plan: Plan, asked: AutoFit, gpus: int) -> Plan:
    """As ``request.with_plan`` and ``rehearsals_for`` make the job."""
    request = with_plan(api.RunRequest(method="sft", autofit=asked), HINTS, print, to_train=False)
    job = request.job({**request.config, **request.autofit.pins})
    return api.plan(on_cards(job, gpus), earlier=plan, again="autofit plan ...")


def split(knobs: Knobs) -> tuple[int, int, int]:
    return knobs.per_device_train_batch_size, knobs.gradient_accumulation_steps, knobs.processes


def test_the_effective_batch_stays() -> None:
    for begun, gpus, sharding, wanted in (
        (2, 4, None, (4, 1, 4)),
        (2, 1, None, (4, 4, 1)),
        (4, 2, "fsdp2", (4, 4, 2)),
        (2, 8, None, (2, 1, 8)),  # four at once are no longer in the batch of 16
        (1, 2, "zero2", (4, 1, 2)),
    ):
        plan = made(begun)
        now = followed(plan, AutoFit(plan=plan, gpus=gpus, sharding=sharding), gpus)
        assert split(now.knobs) == wanted
        assert now.knobs.effective_batch_size == plan.knobs.effective_batch_size
        assert now.optimizer_steps == plan.optimizer_steps
        assert now.knobs.sharding == (sharding or (plan.knobs.sharding or "ddp" if gpus > 1 else None))
        (warning,) = [each for each in now.warnings if "has changed" in each]
        assert f"GPUs {begun} -> {gpus}" in warning


def test_the_sharding_alone_may_be_another_and_the_same_processes_change_nothing() -> None:
    plan = made(2)
    now = followed(plan, AutoFit(plan=plan, sharding="zero1"), 2)
    assert now.knobs == replace(plan.knobs, sharding="zero1")
    again = followed(now, AutoFit(plan=now, gpus=4), 4)
    assert (again.knobs.sharding, split(again.knobs)) == ("zero1", (4, 1, 4))
    for asked in (AutoFit(plan=plan), AutoFit(plan=plan, gpus=2), AutoFit(plan=plan, sharding=plan.knobs.sharding)):
        assert not for_processes.is_shared_otherwise(asked, plan)
        assert followed(plan, asked, 2).knobs == plan.knobs


def test_what_the_plan_cannot_be_shared_by_is_refused() -> None:
    for begun, arguments, asked, message in (
        (2, {}, {"gpus": 3}, "3 GPUs do not divide the effective batch size 16"),
        (2, {}, {"gpus": 4, "effective_batch_size": 32}, "effective_batch_size is 32, and 16 in the plan"),
        (1, {"optim": "adamw_bnb_8bit"}, {"gpus": 2, "sharding": "fsdp2"}, "optim, which does not work with"),
        (4, {"cp_size": 2}, {"gpus": 3}, "--cp_size 2 does not divide 3 GPUs"),
    ):
        plan = made(begun, arguments={**SPLIT, **arguments})
        with pytest.raises(AutofitError, match=message):
            followed(plan, AutoFit(plan=plan, **asked), asked["gpus"])


def test_as_many_gpus_share_a_row_as_before_unless_asked_otherwise() -> None:
    plan = made(4, arguments={**JOB.arguments, "cp_size": 2})
    wider = followed(plan, AutoFit(plan=plan, gpus=8), 8).knobs
    assert (wider.cp_size, split(wider), wider.effective_batch_size) == (2, (4, 1, 8), 16)
    asked = AutoFit(plan=plan, cp_size=1)
    assert for_processes.is_shared_otherwise(asked, plan)
    alone = followed(plan, asked, 4).knobs
    assert (alone.cp_size, split(alone), alone.effective_batch_size) == (1, (4, 1, 4), 16)


def test_an_effective_batch_that_nobody_asked_for_is_told_with_what_it_comes_from_on_several_machines_alone() -> None:
    job, many = Job(method="dpo", model="toy-1B", dataset=None), Topology(nodes=128, devices=8)
    knobs = replace(TRL_DEFAULTS, processes=1024)
    assert [*machine_warnings(job, replace(knobs, processes=8), Topology(devices=8))] == []
    modelled, batch = machine_warnings(job, knobs, many)
    assert modelled == NOT_MODELLED
    assert batch.startswith("8,192 pairs in each optimizer step: with no --effective_batch_size given")
    assert batch.endswith("--effective_batch_size takes multiples of 1024")
    for asked in (replace(job, effective_batch_size=2048), replace(job, arguments={"gradient_accumulation_steps": 2})):
        assert [*machine_warnings(asked, knobs, many)] == [NOT_MODELLED]
