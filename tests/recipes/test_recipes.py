"""The recipes as files: what each opens with, TRL's keys and ours, and how the command reads and lists them. Recipe x
card: what a plan chose is held to one rehearsal. And recipes train for real, by their commands: two steps of a tiny
model on a simulated card.

A whole plan takes from ten seconds to minutes: ``scripts/recipes --models FOLDER`` makes them all, and with ``--write``
the golden files. Here the chosen point for a recipe's own card is rehearsed on copies of few layers, which is what a
search trusts until it confirms its choice. Other cards, recipes that sample or have the optimizer on the host, which
take longest to rehearse, and longer rows of the same reward model are the script's alone.
"""

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from recipe_plans.rows import OTHER_CARD, SAME_SIZES, all_rows, settings
from recipe_plans.rows import flags as flags_of
from recipe_plans.statements import VERSIONED, WIDTH, Golden

from autotrain_mem import api
from autotrain_mem.cli import flags, main
from autotrain_mem.machine.catalog import catalog
from autotrain_mem.methods.interface import method_of
from autotrain_mem.planning.predictions import Predictions
from autotrain_mem.planning.rehearsals import Lengths
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import MIB
from autotrain_mem.support.yaml_files import Recipe, recipe, recipes
from autotrain_mem.types.methods_table import METHODS, REWARD_MODEL_ARGUMENTS
from tests.place import Autofit

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = pathlib.Path(__file__).parent / "golden"
FACTS: dict[str, dict[str, Any]] = json.loads(pathlib.Path(__file__).with_name("architectures.json").read_text())
"""What memory depends on, of the config.json of each recipe's model: the suite needs nobody's files."""
TINY = {"gemma3_text": "gemma3", "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3_moe"}
CARDS = {card.name for card in catalog()}
DECIDED = {
    *("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "dtype", "optim"),
    *("activation_offloading", "local_rollout_forward_batch_size", "bf16", "fp16"),
}

every_recipe = pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: recipe.name)


def text(recipe: Recipe) -> str:
    return recipe.path.read_text(encoding="utf-8")


def test_every_method_has_a_recipe_and_golden_files_are_read_as_they_were_written() -> None:
    assert {recipe.method for recipe in recipes()} == set(METHODS)
    assert OTHER_CARD.keys() == {recipe.name for recipe in recipes() if recipe.gpus == 1}
    texts = {path.name: path.read_text(encoding="utf-8") for path in GOLDEN.iterdir()}
    assert {name: str(Golden.read(text)) for name, text in texts.items()} == texts
    assert texts.keys() <= {f"{recipe.name}.{card}.txt" for recipe, card in all_rows()}


@every_recipe
def test_a_recipe_opens_with_its_commands_and_its_golden_plan_and_leaves_open_what_that_decides(recipe: Recipe) -> None:
    command = f"#   autofit {recipe.method} --recipe {recipe.name}"
    assert f"{command}\n" in text(recipe)
    number = f" --gpus {recipe.gpus}" if recipe.gpus > 1 else ""
    assert f"{command} --gpu {recipe.card}{number} --plan_only\n" in text(recipe)
    assert recipe.card in CARDS
    assert all(len(line) <= WIDTH for line in text(recipe).splitlines())
    keys: dict[str, Any] = settings(recipe)
    assert not keys.keys() & DECIDED
    assert "gpu" not in keys["autofit"]
    assert keys["output_dir"] == recipe.name
    models = [keys[name] for name in ("model_name_or_path", *REWARD_MODEL_ARGUMENTS) if name in keys]
    assert all(SAME_SIZES.get(name, name) in FACTS for name in models)
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "scripts" / "constraints.txt").read_text(), re.MULTILINE))
    versions = ", ".join(f"{name} {pins[name]}" for name in VERSIONED)
    assert f"# versions  {versions}\n" in text(recipe)
    golden = Golden.read((GOLDEN / f"{recipe.name}.{recipe.card}.txt").read_text(encoding="utf-8"))
    assert f"# level     {golden.level}\n" in text(recipe)
    rows, steps = golden.knobs.per_device_train_batch_size, golden.knobs.gradient_accumulation_steps
    assert f"# settings  {rows} x {steps} " in text(recipe)
    for lever in golden.levers:
        assert f"# why       {lever}: " in text(recipe)


@every_recipe
def test_trls_own_parser_reads_the_file_without_our_block(recipe: Recipe, tmp_path: pathlib.Path) -> None:
    """By the parser of ``trl METHOD``; for PPO, which has no command, by the dataclasses around its config."""
    config = {name: value for name, value in settings(recipe).items() if name != "autofit"}
    file = tmp_path / "trl.yaml"
    file.write_text(yaml.safe_dump({**config, "use_cpu": True}))  # TRL asks for a GPU otherwise
    parsed = method_of(recipe.method).make_parser().parse_args_and_config(["--config", str(file)])
    values = {name: getattr(value, "value", value) for each in parsed for name, value in vars(each).items()}
    assert {name: values[name] for name in config} == config


def test_the_long_reward_recipes_differ_by_their_length_alone() -> None:
    """So what holds of one holds of all: ``HELD`` has the shortest."""
    long = {recipe.name.rpartition("-")[2]: settings(recipe) for recipe in recipes() if recipe.method == "reward"}
    assert {name: said.pop("max_length") for name, said in long.items()} == {"8k": 8192, "16k": 16384, "32k": 32768}
    assert {said.pop("output_dir").rpartition("-")[2] for said in long.values()} == long.keys()
    assert long["8k"] == long["16k"] == long["32k"]


NAME = "reward-gemma3-1b-lora-8k"


def test_a_recipe_is_read_as_a_config_is() -> None:
    request, output = flags.read("autofit plan reward", ["--recipe", NAME, "--effective-batch-size", "8"])
    as_config = ["--config", str(recipe(NAME).path), "--effective-batch-size=8"]
    assert (request, output) == flags.read("autofit plan reward", as_config)
    assert request.config["lora_r"] == 8
    assert request.autofit.effective_batch_size == 8


def test_a_recipe_that_is_none_of_the_method_is_refused_with_what_is_meant() -> None:
    for line, said in (
        (f"plan sft --recipe {NAME}", f"autofit plan reward --recipe {NAME}"),
        (f"sft --recipe {NAME}", f"autofit reward --recipe {NAME}"),
        ("reward --recipe reward-gemma3-1b-lora-8", f"Did you mean {NAME}?"),
        ("reward --recipe reward-gemma3-lora-8k.yaml", f"Did you mean {NAME} or"),
        ("sft --recipe sft-lama", "Did you mean sft-llama3.1-8b-full-2x80gb or sft-llama3.1-8b-full-4x24gb"),
        ("sft --recipe qlora.yaml", "Did you mean grpo-qwen3-8b-qlora"),
        ("sft --recipe soup", "autofit recipes"),
        (f"reward --recipe {NAME} --config mine.yaml", str(recipe(NAME).path)),
    ):
        prog, _, words = f"autofit {line}".partition(" --")
        with pytest.raises(UsageError) as refused:
            flags.read(prog, f"--{words}".split())
        assert said in refused.value.hint, line


@pytest.mark.parametrize(
    ("words", "said"), [("sft", "'sft'"), ("--gpu", "--gpu"), (f"{NAME} more", "more"), (f"{NAME} --json", "--json")]
)
def test_the_list_takes_nothing_but_a_recipes_name(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["recipes", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_the_list_is_a_table_of_all_or_json_and_a_named_one_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for each in recipes():
        (line,) = [line for line in lines if line.startswith(f"{each.name} ")]
        number = f"{each.gpus}x" if each.gpus > 1 else ""
        assert line.split()[1:3] == [each.method, f"{number}{each.card}"]
        assert line.endswith(each.what)
    assert main.run(["recipes", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    named = [tuple(each[name] for name in ("name", "method", "card", "gpus", "what")) for each in told["recipes"]]
    assert named == [(each.name, each.method, each.card, each.gpus, each.what) for each in recipes()]
    assert all(pathlib.Path(each["path"]).is_file() for each in told["recipes"])
    assert main.run(["recipes", NAME]) == 0
    assert capsys.readouterr().out == recipe(NAME).path.read_text()


FEW_LAYERS = 0.005
"""Copies of few layers, expanded, against the whole model that a golden file holds: ``scripts/expansion``."""
HELD = ("sft-llama3.1-8b-lora-8bit", "kto-qwen2.5-0.5b", "reward-gemma3-1b-lora-8k")
"""A quantized base, full training on pairs, and long rows; of the others ``scripts/recipes`` alone knows."""


@pytest.fixture(scope="session")
def models(place: pathlib.Path) -> pathlib.Path:
    """``ORG/NAME/config.json`` of each model in real size, which planning needs and nothing more."""
    for name, facts in FACTS.items():
        folder = place / "real" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**facts, "torch_dtype": "bfloat16"}))
    return place / "real"


@pytest.mark.slow
@pytest.mark.parametrize("held", HELD)
def test_what_a_plan_chose_needs_what_it_did(held: str, models: pathlib.Path, workers: api.Workers) -> None:
    one = recipe(held)
    expected = Golden.read((GOLDEN / f"{held}.{one.card}.txt").read_text(encoding="utf-8"))
    words = ["--recipe", held, "--gpu", one.card, *flags_of(one, models)]
    request, _ = flags.read(f"autofit plan {one.method}", words)
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
    return str(model_folder(TINY[FACTS[SAME_SIZES.get(name, name)]["model_type"]]))


@pytest.mark.slow
@pytest.mark.parametrize("trained", TRAINED)
def test_a_recipe_trains_two_steps(trained: str, model_folder: Callable[[str], pathlib.Path], autofit: Autofit) -> None:
    one = recipe(trained)
    keys: dict[str, Any] = settings(one)
    named = {"model": keys["model_name_or_path"]}
    named |= {name: keys[name] for name in REWARD_MODEL_ARGUMENTS if name in keys}
    folders = [word for name, model in named.items() for word in (f"--{name}", tiny(model_folder, model))]
    words = f"--recipe {trained} {SHARED} {SHORT[one.method]} --output_dir trained/{trained}".split()
    ran = autofit(one.method, *words, *folders)
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert told["run"]["steps"] == STEPS
    assert isinstance(told["run"]["last_loss"], float)
    knobs = told["plan"]["knobs"]
    assert all(knobs[name] == keys.get(name, False) for name in ("use_peft", "load_in_4bit", "load_in_8bit"))
    assert knobs["optimizer_offload"] == keys["autofit"].get("optimizer_offload", False)
