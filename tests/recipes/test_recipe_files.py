"""The recipes as files: what each opens with, TRL's keys and ours, and nothing that a plan is to decide."""

from __future__ import annotations

import copy
import importlib
import pathlib
import re
from typing import Any

import architectures
import pytest
import yaml
from recipe_plans.rows import OTHER_CARD, SAME_SIZES, all_rows, settings
from recipe_plans.statements import VERSIONED, WIDTH, Golden

from autotrain_mem.machine.catalog import catalog
from autotrain_mem.methods.table import METHODS, REWARD_MODEL_ARGUMENTS
from autotrain_mem.recipe_files import Recipe, recipes

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
    methods = [recipe.method for recipe in recipes()]
    assert set(methods) == set(METHODS)
    assert [recipe.name for recipe in recipes() if recipe.method == "reward"] == [
        f"reward-gemma3-1b-lora-{length}" for length in ("16k", "32k", "8k")
    ]
    assert OTHER_CARD.keys() == {recipe.name for recipe in recipes()}


@every_recipe
def test_a_recipe_opens_with_its_commands(recipe: Recipe) -> None:
    command = f"#   autofit {recipe.method} --recipe {recipe.name}"
    assert f"{command}\n" in text(recipe)
    assert f"{command} --gpu {recipe.card} --plan_only\n" in text(recipe)
    assert recipe.card in CARDS
    assert all(len(line) <= WIDTH for line in text(recipe).splitlines())


@every_recipe
def test_its_header_is_of_the_tested_versions_and_of_its_golden_plan(recipe: Recipe) -> None:
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
def test_it_leaves_open_what_a_plan_decides(recipe: Recipe) -> None:
    said: dict[str, Any] = settings(recipe)
    assert not said.keys() & DECIDED
    assert "gpu" not in said["autofit"]
    assert said["output_dir"] == recipe.name
    models = [said[name] for name in ("model_name_or_path", *REWARD_MODEL_ARGUMENTS) if name in said]
    assert all(SAME_SIZES.get(name, name) in architectures.FACTS for name in models)


@every_recipe
def test_trls_own_parser_reads_the_file_without_our_block(recipe: Recipe, tmp_path: pathlib.Path) -> None:
    """By the parser of ``trl METHOD``; for PPO, which has no command, by the dataclasses around its config."""
    said: dict[str, Any] = settings(recipe)
    config = copy.copy(said)
    del config["autofit"]
    file = tmp_path / "trl.yaml"
    file.write_text(yaml.safe_dump({**config, "use_cpu": True}))  # TRL asks for a GPU otherwise
    parsed = trls_parser(recipe.method).parse_args_and_config(["--config", str(file)])
    values = {name: value for each in parsed for name, value in vars(each).items()}
    assert {name: _plain(values[name]) for name in config} == config


def trls_parser(method: str) -> Any:
    from trl import ModelConfig, ScriptArguments, TrlParser

    if method != "ppo":
        return importlib.import_module(f"trl.scripts.{method}").make_parser()
    config = importlib.import_module("trl.experimental.ppo").PPOConfig
    return TrlParser((ScriptArguments, config, ModelConfig))


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def test_the_long_reward_recipes_differ_by_their_length_alone() -> None:
    """So what trains one, its length overridden, trains all: ``test_recipe_training`` trains the shortest."""
    long = {recipe.name.rpartition("-")[2]: settings(recipe) for recipe in recipes() if recipe.method == "reward"}
    assert {name: said.pop("max_length") for name, said in long.items()} == {"8k": 8192, "16k": 16384, "32k": 32768}
    assert {name: said.pop("output_dir") for name, said in long.items()}
    assert long["8k"] == long["16k"] == long["32k"]
    assert {name: long["8k"][name] for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")} == {
        "lora_r": 8,
        "lora_alpha": 32,
        "lora_dropout": 0.1,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj"],
    }


MODELS = ROOT.parent / "shared" / "models"


@pytest.mark.skipif(not MODELS.is_dir(), reason="no real configs are here")
@pytest.mark.parametrize("name", architectures.FACTS)
def test_the_architectures_are_those_of_the_real_configs(name: str, tmp_path: pathlib.Path) -> None:
    """As transformers reads both."""
    from transformers import AutoConfig

    ours, real = (AutoConfig.from_pretrained(folder) for folder in (_written(tmp_path, name), MODELS / name))
    facts = [*architectures.FACTS[name], "layer_types", "hidden_act", "attention_bias", "mlp_bias", "head_dim"]
    assert {fact: getattr(ours, fact, None) for fact in facts} == {fact: getattr(real, fact, None) for fact in facts}
    assert ours.architectures == real.architectures


def _written(folder: pathlib.Path, name: str) -> pathlib.Path:
    return architectures.write_config(folder, name)
