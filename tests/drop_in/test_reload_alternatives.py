"""Levers that would need a model object loaded again are told, with figures, and never pulled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotrain_mem.drop_in.reload_alternatives import with_reloaded
from autotrain_mem.errors import DoesNotFitError
from autotrain_mem.rehearsal.python_call.capture import Call, read
from autotrain_mem.spec import Job, Plan
from autotrain_mem.spec.job import PythonCall
from tests.report.report_examples import PLAN
from tests.tiny import tiny_config


def call_of(model: Any, folder: Path) -> tuple[Call, Job]:
    kwargs = {"model": model, "train_dataset": [1]}
    call = Call(trainer=dict, args=(), kwargs=kwargs, keywords=kwargs)
    objects = PythonCall(path=str(folder), holds_model=True, holds_rows=True, digest="")
    return call, Job(method="sft", model="tiny", dataset=None, arguments={"dtype": "float32"}, python_call=objects)


def causal(family: str = "qwen2") -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(tiny_config(family))


class Planner:
    """Answers for an object and for a name, and remembers what it was asked."""

    def __init__(self, for_object: Plan | None, for_name: Plan | None) -> None:
        self._answers = {True: for_object, False: for_name}
        self.asked: list[Job] = []

    def __call__(self, job: Job) -> Plan:
        assert job.python_call is not None
        self.asked.append(job)
        plan = self._answers[job.python_call.holds_model]
        if plan is None:
            raise DoesNotFitError("It does not fit.", hint="take a larger card")
        return plan


def plan_at(level: str, **knobs: Any) -> Plan:
    estimate = replace(PLAN.estimate, knobs=replace(PLAN.knobs, **{"dtype": "float32", **knobs}))
    return replace(PLAN, level=level, estimate=estimate)


def test_a_plan_that_gives_something_up_shows_what_a_name_would_allow(tmp_path: Path) -> None:
    planner = Planner(plan_at("LoRA", use_peft=True), plan_at("rounding", dtype="bfloat16"))
    call, job = call_of(causal(), tmp_path)
    found = with_reloaded(planner, job, call, tmp_path)
    assert found.knobs.dtype == "float32"
    assert [(other.level, other.knobs.dtype) for other in found.alternatives[-1:]] == [
        ("rounding, model given by its name", "bfloat16")
    ]
    again = planner.asked[1]
    assert "dtype" not in again.arguments
    assert read(again).keywords["model"] == again.model  # the object is nowhere in the call any more


@pytest.mark.parametrize("fits_by_name", [True, False])
def test_where_nothing_fits_the_error_says_whether_a_name_would(fits_by_name: bool, tmp_path: Path) -> None:
    planner = Planner(None, plan_at("rounding", dtype="bfloat16") if fits_by_name else None)
    with pytest.raises(DoesNotFitError) as caught:
        with_reloaded(planner, *reversed(call_of(causal(), tmp_path)), tmp_path)
    first, *others = caught.value.hint.splitlines()
    assert first == "take a larger card"
    assert [line.startswith("given by its name, model=") and "bfloat16" in line for line in others] == [
        True
    ] * fits_by_name


@pytest.mark.parametrize("level", ["lossless", "LoRA"])
def test_nothing_more_is_asked_of_a_lossless_plan_nor_of_a_model_that_has_no_name(level: str, tmp_path: Path) -> None:
    class Own(torch.nn.Module):
        pass

    model = causal()
    if level == "LoRA":
        model.extra = Own()
    planner = Planner(plan_at(level), plan_at("rounding", dtype="bfloat16"))
    call, job = call_of(model, tmp_path)
    assert with_reloaded(planner, job, call, tmp_path) == plan_at(level)
    assert len(planner.asked) == 1
