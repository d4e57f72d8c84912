"""Recipe x card: what a plan chose is held to one rehearsal. And recipes train for real, by their commands: two steps
of a tiny model on a simulated card.

A whole plan takes from ten seconds to minutes: ``scripts/recipes --models FOLDER`` makes them all, and with ``--write``
the golden files. Here the chosen point for a recipe's own card is rehearsed on copies of few layers, which is what a
search trusts until it confirms its choice. Other cards, recipes that sample or have the optimizer on the host, which
take longest to rehearse, and longer rows of the same reward model are the script's alone.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import architectures
import pytest
from recipe_plans.rows import SAME_SIZES, flags, settings
from recipe_plans.statements import Golden

from autotrain_mem import api
from autotrain_mem.cli import flags as own_flags
from autotrain_mem.planning.predictions import Predictions
from autotrain_mem.planning.rehearsals import Lengths
from autotrain_mem.support.units import MIB
from autotrain_mem.support.yaml_files import recipe as named_recipe
from autotrain_mem.types.methods_table import REWARD_MODEL_ARGUMENTS
from tests.place import Autofit

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


STEPS = 2
SHARED = (
    f"--gpu 400MiB --simulate --no_probe --json --max_steps {STEPS} --logging_steps 1 --save_strategy no "
    "--fit lossless --forbid activation_offloading --gradient_checkpointing false --effective_batch_size 8 "
    "--per_device_train_batch_size 8"
)
SHORT = {
    "sft": "--dataset data.jsonl --max_length 32",
    "grpo": "--dataset prompts.jsonl --max_completion_length 8 --reward_funcs think_format_reward",
    "ppo": "--dataset prompts.jsonl --response_length 8 --num_ppo_epochs 1 --local_rollout_forward_batch_size 8",
}
"""Lengths for a CPU; what is trained, and how, stays the recipe's. The recipes' own reward needs a package."""
TRAINED = ["sft-llama3.1-8b-lora-8bit", "grpo-qwen3-8b-qlora", "ppo-qwen2.5-7b-lora"]
"""One with each kind of a quantized base and of an optimizer on the host, and PPO's adapter. Plain training of each
method is that of ``tests/cli/test_methods.py``."""


def tiny(model_folder: Callable[[str], pathlib.Path], name: str) -> str:
    """Where a tiny model of the architecture lies, weights and all: ``Qwen/Qwen3-8B`` -> a tiny Qwen3."""
    return str(model_folder(architectures.TINY[architectures.FACTS[SAME_SIZES.get(name, name)]["model_type"]]))


@pytest.mark.parametrize("trained", TRAINED)
def test_a_recipe_trains_two_steps(trained: str, model_folder: Callable[[str], pathlib.Path], autofit: Autofit) -> None:
    recipe = named_recipe(trained)
    keys: dict[str, Any] = settings(recipe)
    named = {"model": keys["model_name_or_path"]} | {
        name: keys[name] for name in REWARD_MODEL_ARGUMENTS if name in keys
    }
    folders = [word for name, model in named.items() for word in (f"--{name}", tiny(model_folder, model))]
    words = f"--recipe {recipe.name} {SHARED} {SHORT[recipe.method]} --output_dir trained/{recipe.name}".split()
    ran = autofit(recipe.method, *words, *folders)
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert told["run"]["steps"] == STEPS
    assert isinstance(told["run"]["last_loss"], float)
    knobs = told["plan"]["knobs"]
    assert all(knobs[name] == keys.get(name, False) for name in ("use_peft", "load_in_4bit", "load_in_8bit"))
    assert knobs["optimizer_offload"] == keys["autofit"].get("optimizer_offload", False)
