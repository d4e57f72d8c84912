"""The batch of evaluation: it follows the micro-batch where the user did not say otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from synthetic_memory import TRL, LinearMemory, space_of

from autotrain_mem.planner.points import line
from autotrain_mem.planner.search import search
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Harm, codec
from autotrain_mem.units import GIB

DEFAULTS = replace(TRL, per_device_eval_batch_size=8)


def evaluated(**words: object) -> Space:
    return space_of(defaults=DEFAULTS, eval_strategy="steps", **words)  # type: ignore[arg-type]


def evaluated_rows(space: Space) -> list[tuple[int, int | None]]:
    points = line(space, space.base, checkpointing=True)
    return [(knobs.per_device_train_batch_size, knobs.per_device_eval_batch_size) for knobs in points]


def test_a_job_that_evaluates_nothing_has_no_batch_of_evaluation() -> None:
    assert space_of(defaults=DEFAULTS).base.per_device_eval_batch_size is None
    assert "per_device_eval_batch_size" not in codec.to_json(space_of(defaults=DEFAULTS).base)


def test_the_batch_of_evaluation_follows_the_micro_batch_up_to_trls_own() -> None:
    assert evaluated_rows(evaluated(effective_batch_size=16)) == [(1, 1), (2, 2), (4, 4), (8, 8), (16, 8)]


@pytest.mark.parametrize("words", [{"per_device_eval_batch_size": 8}, {"forbid": frozenset({"eval_batch"})}], ids=str)
def test_a_batch_of_evaluation_that_is_given_or_forbidden_to_move_stays(words: dict[str, Any]) -> None:
    assert {rows for _, rows in evaluated_rows(evaluated(**words))} == {8}


@pytest.mark.parametrize("method", ["grpo", "rloo", "ppo"])
def test_methods_that_sample_keep_their_batch_of_evaluation(method: str) -> None:
    assert {rows for _, rows in evaluated_rows(evaluated(method=method))} == {8}


def test_the_base_is_what_trl_would_take() -> None:
    assert evaluated(per_device_train_batch_size=1).base.per_device_eval_batch_size == 8


def test_a_reference_that_scores_before_training_follows_too() -> None:
    space = space_of(defaults=DEFAULTS, method="dpo", precompute_ref_log_probs=True)
    assert evaluated_rows(space)[0] == (1, 1)


def test_an_evaluation_that_would_be_the_peak_gives_way_before_anything_else() -> None:
    model = LinearMemory(budget_bytes=20 * GIB, evaluated_bytes=1_000_000)
    space = evaluated(per_device_train_batch_size=1, gradient_checkpointing=True)
    assert not model.estimate(space.base).fits
    (lever,) = search(space, model).levers
    assert (lever.name, lever.before, lever.after, lever.harm) == ("per_device_eval_batch_size", 8, 1, Harm.NONE)
    assert lever.why == "evaluation takes no more rows at once than training does: the same results, in more batches"
