"""Recipe x card: one plan made whole, and what others chose, held to one rehearsal each.

A whole plan takes from ten seconds to minutes: ``scripts/recipes --models FOLDER`` makes them all, and with ``--write``
the golden files. Here the chosen point for a recipe's own card is rehearsed on copies of few layers, which is what a
search trusts until it confirms its choice. Other cards, recipes that sample, whose rollouts take longest to rehearse,
and the length between two that are rehearsed are the script's alone.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import architectures
import pytest
from recipe_plans.rows import OTHER_CARD, flags
from recipe_plans.statements import Golden

from autotrain_mem import api
from autotrain_mem.cli import commands
from autotrain_mem.cli import flags as own_flags
from autotrain_mem.engine.predict.predictions import Predictions
from autotrain_mem.engine.rehearsals import Lengths
from autotrain_mem.methods.table import METHODS
from autotrain_mem.recipe_files import Recipe, recipe, recipes
from autotrain_mem.spec import Plan, codec
from autotrain_mem.units import MIB

pytestmark = pytest.mark.slow

GOLDEN = pathlib.Path(__file__).parent / "golden"
FEW_LAYERS = 0.005
"""Copies of few layers, expanded, against the whole model that a golden file holds: ``scripts/expansion``."""
WHOLE = "sft-qwen2.5-0.5b"
BETWEEN = "reward-gemma3-1b-lora-16k"
HELD = [each for each in recipes() if not METHODS[each.method].is_online and each.name != BETWEEN]


@pytest.fixture(scope="session")
def models(place: pathlib.Path) -> pathlib.Path:
    for name in architectures.FACTS:
        architectures.write_config(place / "real", name)
    return place / "real"


def golden(recipe: Recipe, card: str) -> Golden:
    return Golden.read((GOLDEN / f"{recipe.name}.{card}.txt").read_text(encoding="utf-8"))


@pytest.mark.parametrize("recipe", HELD, ids=lambda recipe: recipe.name)
def test_what_a_plan_chose_needs_what_it_did(recipe: Recipe, models: pathlib.Path, workers: api.Workers) -> None:
    card = OTHER_CARD[WHOLE] if recipe.name == WHOLE else recipe.card
    expected = golden(recipe, card)
    words = ["--recipe", recipe.name, "--gpu", card, *flags(recipe, models)]
    wish, _ = own_flags.read(f"autofit plan {recipe.method}", words)
    rehearsals = api.rehearsals_for(workers, wish, print)
    predictions = Predictions(rehearsals, rehearsals.describe(), Lengths(longest=wish.autofit.prompt_length))
    (found,) = predictions.rehearse([expected.knobs], whole=False)
    assert found.fits
    assert found.budget_bytes == pytest.approx(expected.budget_mib * MIB, abs=MIB)
    assert found.required_bytes == pytest.approx(expected.required_mib * MIB, rel=FEW_LAYERS)


def test_a_whole_plan_is_the_one_that_is_kept(models: pathlib.Path, printed: Callable[..., str]) -> None:
    """For its own card; its choice for the other one is held above."""
    one = recipe(WHOLE)
    words = ["--recipe", one.name, "--gpu", one.card, "--json", *flags(one, models)]
    plan = codec.from_json(Plan, json.loads(printed(commands.plan, one.method, words)))
    assert str(Golden.of(plan)) == str(golden(one, one.card))
    (warning,) = plan.warnings
    assert "trl-lib/Capybara could not be looked at" in warning
