"""How scripts/search_quality tells whether a search missed anything."""

from dataclasses import replace

import pytest
from search_quality_grid import grid
from search_quality_grid.grid import Outcome, compare
from synthetic_memory import LinearMemory, brute_force, space_of

from autotrain_mem.search.search import Found, search
from autotrain_mem.support.units import GIB
from autotrain_mem.types import Knobs

SPACE = space_of(max_length=1024, effective_batch_size=8)


@pytest.mark.parametrize("budget_gib", [2, 10, 40])
def test_the_grid_holds_the_level_and_the_speed_that_asking_for_every_point_gives(budget_gib: int) -> None:
    model = LinearMemory(budget_bytes=budget_gib * GIB)
    outcome = compare(SPACE, model)
    assert outcome.best is not None
    assert (outcome.level, outcome.best.tokens_per_second) == brute_force(SPACE, model)
    assert outcome.skipped is None


def outcome_of(monkeypatch: pytest.MonkeyPatch, level: str, knobs: Knobs) -> Outcome:
    """What is said of a search that chose these."""
    model = LinearMemory(budget_bytes=40 * GIB)
    found = Found(level=level, estimate=model.estimate(knobs), attempts=(), levers=(), alternatives=())
    monkeypatch.setattr(grid, "search", lambda space, predictor: found)
    return compare(SPACE, model)


def test_a_search_that_takes_a_slow_plan_has_a_low_ratio_and_shows_what_more_rows_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = search(SPACE, LinearMemory(budget_bytes=40 * GIB))
    one_row = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "gradient_checkpointing": True}
    outcome = outcome_of(monkeypatch, right.level, replace(right.estimate.knobs, **one_row))
    assert outcome.ratio < 0.99
    assert outcome.larger is not None
    assert outcome.larger.knobs.per_device_train_batch_size == 2
    assert outcome.could_gain
    assert outcome.use < 0.85


def test_a_search_that_passes_over_a_level_that_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lora = replace(SPACE.base, use_peft=True, dtype="bfloat16")
    assert outcome_of(monkeypatch, "LoRA", lora).skipped == "lossless"
