"""How scripts/search_quality tells whether a search missed anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from search_quality_grid import grid
from search_quality_grid.grid import compare
from synthetic_memory import LinearMemory, brute_force, space_of

from autotrain_mem.planner.search import Found, search
from autotrain_mem.planner.space import Space
from autotrain_mem.spec import Knobs
from autotrain_mem.units import GIB

SPACE = space_of(max_length=1024, effective_batch_size=8)


@pytest.mark.parametrize("budget_gib", [2, 10, 40])
def test_the_grid_holds_the_level_and_the_speed_that_asking_for_every_point_gives(budget_gib: int) -> None:
    model = LinearMemory(budget_bytes=budget_gib * GIB)
    outcome = compare(SPACE, model)
    assert outcome.best is not None
    assert (outcome.level, outcome.best.tokens_per_second) == brute_force(SPACE, model)
    assert outcome.skipped is None


def found_at(level: str, knobs: Knobs, model: LinearMemory) -> Found:
    return Found(level=level, estimate=model.estimate(knobs), attempts=(), levers=(), alternatives=())


def searched_as(monkeypatch: pytest.MonkeyPatch, found: Found) -> None:
    monkeypatch.setattr(grid, "search", lambda space, predictor: found)


def slowest_of_level(space: Space, model: LinearMemory) -> Found:
    """A choice as bad as the level allows: one row at a time, with checkpointing."""
    right = search(space, model)
    knobs = replace(
        right.estimate.knobs,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        gradient_checkpointing=True,
    )
    return found_at(right.level, knobs, model)


def test_a_search_that_takes_a_slow_plan_has_a_low_ratio_and_shows_what_more_rows_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = LinearMemory(budget_bytes=40 * GIB)
    searched_as(monkeypatch, slowest_of_level(SPACE, model))
    outcome = compare(SPACE, model)
    assert outcome.ratio < 0.99
    assert outcome.larger is not None
    assert outcome.larger.knobs.per_device_train_batch_size == 2
    assert outcome.could_gain
    assert outcome.use < 0.85


def test_a_search_that_passes_over_a_level_that_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LinearMemory(budget_bytes=40 * GIB)
    lora = replace(SPACE.base, use_peft=True, dtype="bfloat16")
    searched_as(monkeypatch, found_at("LoRA", lora, model))
    assert compare(SPACE, model).skipped == "lossless"
