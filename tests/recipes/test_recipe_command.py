"""``autofit recipes`` and ``--recipe``, as far as they need no rehearsal."""

from __future__ import annotations

import json
import pathlib

import pytest

from autotrain_mem import recipe_files
from autotrain_mem.cli import flags, main
from autotrain_mem.errors import UsageError
from autotrain_mem.recipe_files import recipe, recipes
from autotrain_mem.spec import codec

NAME = "reward-gemma3-1b-lora-8k"


def refused(prog: str, *words: str) -> UsageError:
    with pytest.raises(UsageError) as raised:
        flags.read(prog, words)
    return raised.value


def test_a_recipe_is_read_as_a_config_is() -> None:
    own = flags.read("autofit plan reward", ["--recipe", NAME, "--effective-batch-size", "8"])
    assert own == flags.read("autofit plan reward", ["--config", str(recipe(NAME).path), "--effective-batch-size=8"])
    assert own.config["lora_r"] == 8
    assert own.effective_batch_size == 8


def test_a_recipe_of_another_method_names_its_command() -> None:
    error = refused("autofit plan sft", "--recipe", NAME)
    assert error.message == f"The recipe {NAME} is for reward, not sft."
    assert error.hint == f"autofit plan reward --recipe {NAME}"
    assert refused("autofit sft", "--recipe", NAME).hint == f"autofit reward --recipe {NAME}"


@pytest.mark.parametrize("name", ["reward-gemma3-1b-lora-8", "reward-gemma3-lora-8k.yaml"])
def test_an_unknown_recipe_is_answered_with_the_nearest(name: str) -> None:
    assert refused("autofit reward", "--recipe", name).hint.startswith(f"Did you mean --recipe {NAME}? ")


def test_a_name_that_is_near_to_none_is_answered_with_the_list() -> None:
    assert refused("autofit sft", "--recipe", "soup").hint.startswith("autofit recipes lists them")


def test_recipe_and_config_exclude_each_other() -> None:
    assert str(recipe(NAME).path) in refused("autofit reward", "--recipe", NAME, "--config", "mine.yaml").hint


def test_a_key_of_ours_that_does_not_exist_is_refused_with_the_nearest(tmp_path: pathlib.Path) -> None:
    """TRL's own keys are its parser's to know: tests/cli/golden/config_unknown_keys.txt."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(recipe(NAME).path.read_text().replace("effective_batch_size", "efective_batch_size"))
    error = refused("autofit reward", "--config", str(mine))
    assert "efective_batch_size" in error.message
    assert "did you mean effective_batch_size?" in error.hint


def test_the_list_is_a_table_of_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for each in recipes():
        (line,) = [line for line in lines if line.startswith(f"{each.name} ")]
        assert line.split()[1:3] == [each.method, each.card]
        assert line.endswith(each.what)


def test_the_list_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["recipes", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["recipes"] == [codec.to_json(each) for each in recipes()]
    assert all(pathlib.Path(each["path"]).is_file() for each in told["recipes"])


def test_a_recipe_that_is_named_is_printed_as_the_file_that_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["recipes", NAME]) == 0
    assert capsys.readouterr().out == recipe(NAME).path.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sft", "No recipe is called 'sft'."),
        ("--gpu", "autofit recipes takes no --gpu."),
        (f"{NAME} more", "autofit recipes NAME takes no more."),
        (f"{NAME} --json", "autofit recipes NAME takes no --json."),
    ],
)
def test_the_list_takes_nothing_but_a_recipes_name(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["recipes", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_file_without_a_header_is_no_recipe(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sft-bare.yaml").write_text("learning_rate: 1.0e-4\n")
    with pytest.raises(ValueError, match="does not open with"):
        recipe_files.read_recipe(tmp_path / "sft-bare.yaml")
