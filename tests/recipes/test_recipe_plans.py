"""Recipe x card: what a plan chose is held to one rehearsal.

A whole plan takes from ten seconds to minutes: ``scripts/recipes --models FOLDER`` makes them all, and with ``--write``
the golden files. Here the chosen point for a recipe's own card is rehearsed on copies of few layers, which is what a
search trusts until it confirms its choice. Other cards, recipes that sample or have the optimizer on the host, which
take longest to rehearse, and longer rows of the same reward model are the script's alone.
"""

import json
import pathlib

import architectures
import pytest
from recipe_plans.rows import flags
from recipe_plans.statements import Golden

from autotrain_mem import api
from autotrain_mem.cli import flags as own_flags
from autotrain_mem.planning.predictions import Predictions
from autotrain_mem.planning.rehearsals import Lengths
from autotrain_mem.support.units import MIB
from autotrain_mem.support.yaml_files import recipe as named_recipe

pytestmark = pytest.mark.slow

GOLDEN = pathlib.Path(__file__).parent / "golden"
FEW_LAYERS = 0.005
"""Copies of few layers, expanded, against the whole model that a golden file holds: ``scripts/expansion``."""
HELD = ("sft-llama3.1-8b-lora-8bit", "kto-qwen2.5-0.5b", "reward-gemma3-1b-lora-8k")
"""A quantized base, full training on pairs, and long rows; of the others ``scripts/recipes`` alone knows."""


@pytest.fixture(scope="session")
def models(place: pathlib.Path) -> pathlib.Path:
    """``ORG/NAME/config.json`` of each model in real size, which planning needs and nothing more."""
    for name, facts in architectures.FACTS.items():
        folder = place / "real" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**facts, "torch_dtype": "bfloat16"}))
    return place / "real"


@pytest.mark.parametrize("held", HELD)
def test_what_a_plan_chose_needs_what_it_did(held: str, models: pathlib.Path, workers: api.Workers) -> None:
    recipe = named_recipe(held)
    name = f"{recipe.name}.{recipe.card}.txt"
    expected = Golden.read((GOLDEN / name).read_text(encoding="utf-8"))
    words = ["--recipe", recipe.name, "--gpu", recipe.card, *flags(recipe, models)]
    request, _ = own_flags.read(f"autofit plan {recipe.method}", words)
    lengths = Lengths(longest=request.autofit.prompt_length)
    predictions = Predictions(api.rehearsals_for(workers, request, print).subject(lengths=lengths))
    (found,) = predictions.rehearse([expected.knobs], whole=False)
    assert found.fits
    assert found.budget_bytes == pytest.approx(expected.budget_mib * MIB, abs=MIB)
    assert found.required_bytes == pytest.approx(expected.required_mib * MIB, rel=FEW_LAYERS)
