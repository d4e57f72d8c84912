"""What would have fit: the budget is lowered by what was measured beyond the prediction, and least harm comes first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_worker import FakeWorker
from nouns import TRL_DEFAULTS

from autotrain_mem import api
from autotrain_mem.engine.predict.predictions import Predictions
from autotrain_mem.engine.recover.replan import lowered_budget_bytes, smallest_change
from autotrain_mem.spec import Estimate, Hardware, Job, Knobs, Phase
from autotrain_mem.spec.shortage import Shortage
from autotrain_mem.units import GIB

CARD = Hardware(name="toy", origin="imagined", total_bytes=20 * GIB, free_bytes=20 * GIB, non_torch_bytes=0)


def sizes(job: Job, knobs: Knobs) -> list[int]:
    """A row takes 1 GiB, or a half where it is recomputed; weights take 8 GiB, an adapter's 2."""
    row = GIB // 2 if knobs.gradient_checkpointing else GIB
    return [2 * GIB if knobs.use_peft else 8 * GIB, row * knobs.per_device_train_batch_size]


def rehearsals(worker: FakeWorker | None = None, **words: Any) -> api.Rehearsals:
    job = Job(method="sft", model="m", dataset="d", arguments=words, prompt_length=None)
    workers = api.Workers.holding(worker or FakeWorker(sizes, context_length=2048))  # type: ignore[arg-type]
    return api.Rehearsals(workers=workers, job=job, defaults=TRL_DEFAULTS, hardware=CARD)


def chosen(asked: api.Rehearsals, **knobs: Any) -> Estimate:
    facts, lengths = asked.describe(), asked.lengths()
    return Predictions(asked, facts, lengths).rehearse([replace(TRL_DEFAULTS, max_length=512, **knobs)], whole=True)[0]


def shortage(needed_bytes: int, others_bytes: int = 0) -> Shortage:
    """A run that held all but 2 GiB of what it needed, and asked for these."""
    held = needed_bytes - 2 * GIB
    return Shortage(
        phase=Phase.BACKWARD,
        step=1,
        requested_bytes=2 * GIB,
        segment_bytes=2 * GIB,
        total_bytes=CARD.total_bytes,
        free_bytes=CARD.total_bytes - held - others_bytes,
        allocated_bytes=held,
        reserved_bytes=held,
        outside_bytes=0,
        measured={},
    )


def test_the_budget_is_lowered_by_what_was_needed_beyond_the_prediction() -> None:
    plan = chosen(rehearsals())
    assert plan.required_bytes == 12 * GIB
    assert lowered_budget_bytes(plan, shortage(13 * GIB)) == 12 * GIB - 1
    beyond = 19 * GIB - plan.required_bytes
    assert lowered_budget_bytes(plan, shortage(19 * GIB)) == min(plan.budget_bytes - beyond, 12 * GIB - 1)


def test_what_others_hold_now_is_not_there() -> None:
    plan = chosen(rehearsals())
    assert lowered_budget_bytes(plan, shortage(12 * GIB, others_bytes=10 * GIB)) == 10 * GIB


def test_the_smallest_change_is_that_of_least_harm() -> None:
    asked = rehearsals()
    flags = smallest_change(asked, chosen(asked), shortage(16 * GIB))
    assert flags == "--per_device_train_batch_size 1 --gradient_accumulation_steps 8"


def test_where_no_batch_is_small_enough_more_harm_is_done() -> None:
    asked = rehearsals(per_device_train_batch_size=8, gradient_accumulation_steps=1, use_peft=False)
    flags = smallest_change(asked, chosen(asked), shortage(13 * GIB, others_bytes=11 * GIB))
    assert flags is not None
    assert "--use_peft" in flags


@pytest.mark.parametrize("reason", ["nothing", "failing"])
def test_there_may_be_none(reason: str) -> None:
    worker = FakeWorker(sizes, context_length=2048)
    asked = rehearsals(worker)
    plan = chosen(asked)
    worker.failing = frozenset({"sft"} if reason == "failing" else ())
    assert smallest_change(asked, plan, shortage(20 * GIB, others_bytes=19 * GIB)) is None
