"""Recipes of rows train for real, by their commands: three steps of a tiny model on a simulated card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import check_trains

from autotrain_mem.recipe_files import Recipe, recipes
from tests.place import Autofit

pytestmark = pytest.mark.slow

ALIKE = ("reward-gemma3-1b-lora-16k", "reward-gemma3-1b-lora-32k")
"""They differ from the first by a length that is overridden here: ``test_recipe_files`` holds them to that."""
TRAINED = [each for each in recipes() if each.method in ("sft", "reward", "dpo") and each.name not in ALIKE]


@pytest.mark.parametrize("recipe", TRAINED, ids=lambda recipe: recipe.name)
def test_a_recipe_trains_three_steps(recipe: Recipe, model_folder: Callable[[str], Path], autofit: Autofit) -> None:
    check_trains(recipe, model_folder, autofit)
