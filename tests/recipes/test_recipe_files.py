"""The recipes as files: what each opens with, TRL's keys and ours, and how the command reads and lists them."""

import json
import pathlib
import re
from typing import Any

import architectures
import pytest
import yaml
from recipe_plans.rows import OTHER_CARD, SAME_SIZES, all_rows, settings
from recipe_plans.statements import VERSIONED, WIDTH, Golden

from autotrain_mem.cli import flags, main
from autotrain_mem.machine.catalog import catalog
from autotrain_mem.methods.interface import method_of
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.yaml_files import Recipe, recipe, recipes
from autotrain_mem.types.methods_table import METHODS, REWARD_MODEL_ARGUMENTS

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = pathlib.Path(__file__).parent / "golden"
CARDS = {card.name for card in catalog()}
DECIDED = {
    *("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "dtype", "optim"),
    *("activation_offloading", "local_rollout_forward_batch_size", "bf16", "fp16"),
}
"""What a plan decides for the card that is there."""

every_recipe = pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: recipe.name)


def text(recipe: Recipe) -> str:
    return recipe.path.read_text(encoding="utf-8")


def test_the_recipes_of_the_issue_are_there() -> None:
    assert {recipe.method for recipe in recipes()} == set(METHODS)
    assert OTHER_CARD.keys() == {recipe.name for recipe in recipes() if recipe.gpus == 1}


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
    assert all(SAME_SIZES.get(name, name) in architectures.FACTS for name in models)
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "scripts" / "constraints.txt").read_text(), re.MULTILINE))
    versions = ", ".join(f"{name} {pins[name]}" for name in VERSIONED)
    assert f"# versions  {versions}\n" in text(recipe)
    golden = Golden.read((GOLDEN / f"{recipe.name}.{recipe.card}.txt").read_text(encoding="utf-8"))
    assert f"# level     {golden.level}\n" in text(recipe)
    rows, steps = golden.knobs.per_device_train_batch_size, golden.knobs.gradient_accumulation_steps
    assert f"# settings  {rows} x {steps} " in text(recipe)
    for lever in golden.levers:
        assert f"# why       {lever}: " in text(recipe)


def test_the_golden_files_are_read_as_they_were_written() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in GOLDEN.iterdir()}
    assert {name: str(Golden.read(text)) for name, text in texts.items()} == texts
    assert texts.keys() <= {f"{recipe.name}.{card}.txt" for recipe, card in all_rows()}


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
    """So what holds of one holds of all: ``test_recipe_plans`` rehearses the shortest."""
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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"plan sft --recipe {NAME}", f"autofit plan reward --recipe {NAME}"),
        (f"sft --recipe {NAME}", f"autofit reward --recipe {NAME}"),
        ("reward --recipe reward-gemma3-1b-lora-8", f"Did you mean {NAME}?"),
        ("reward --recipe reward-gemma3-lora-8k.yaml", f"Did you mean {NAME} or"),
        ("sft --recipe sft-lama", "Did you mean sft-llama3.1-8b-full-2x80gb or sft-llama3.1-8b-full-4x24gb"),
        ("sft --recipe qlora.yaml", "Did you mean grpo-qwen3-8b-qlora"),
        ("sft --recipe soup", "autofit recipes"),
        (f"reward --recipe {NAME} --config mine.yaml", str(recipe(NAME).path)),
    ],
)
def test_a_recipe_that_is_none_of_the_method_is_refused_with_what_is_meant(line: str, said: str) -> None:
    prog, _, words = f"autofit {line}".partition(" --")
    with pytest.raises(UsageError) as refused:
        flags.read(prog, f"--{words}".split())
    assert said in refused.value.hint


@pytest.mark.parametrize(
    ("words", "said"), [("sft", "'sft'"), ("--gpu", "--gpu"), (f"{NAME} more", "more"), (f"{NAME} --json", "--json")]
)
def test_the_list_takes_nothing_but_a_recipes_name(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["recipes", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_the_list_is_a_table_of_all_of_them_or_json_and_one_that_is_named_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
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
