"""Recipes that sample train for real too; in a file of their own, so that two processes share what takes longest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import check_trains

from autotrain_mem.methods.table import METHODS
from autotrain_mem.recipe_files import Recipe, recipes
from tests.place import Autofit

pytestmark = pytest.mark.slow

TRAINED = [each for each in recipes() if METHODS[each.method].is_online]


@pytest.mark.parametrize("recipe", TRAINED, ids=lambda recipe: recipe.name)
def test_a_recipe_that_samples_trains_three_steps(
    recipe: Recipe, model_folder: Callable[[str], Path], autofit: Autofit
) -> None:
    check_trains(recipe, model_folder, autofit)
