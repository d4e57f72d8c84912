"""``autofit recipes`` and ``--recipe``, as far as they need no rehearsal."""

from __future__ import annotations

import json
import pathlib

import pytest

from autotrain_mem.cli import flags, main
from autotrain_mem.errors import UsageError
from autotrain_mem.recipe_files import recipe, recipes

NAME = "reward-gemma3-1b-lora-8k"


def test_a_recipe_is_read_as_a_config_is() -> None:
    wish, output = flags.read("autofit plan reward", ["--recipe", NAME, "--effective-batch-size", "8"])
    as_config = ["--config", str(recipe(NAME).path), "--effective-batch-size=8"]
    assert (wish, output) == flags.read("autofit plan reward", as_config)
    assert wish.config["lora_r"] == 8
    assert wish.autofit.effective_batch_size == 8


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"plan sft --recipe {NAME}", f"autofit plan reward --recipe {NAME}"),
        (f"sft --recipe {NAME}", f"autofit reward --recipe {NAME}"),
        ("reward --recipe reward-gemma3-1b-lora-8", f"--recipe {NAME}"),
        ("reward --recipe reward-gemma3-lora-8k.yaml", f"--recipe {NAME}"),
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
    ("words", "said"),
    [("sft", "'sft'"), ("--gpu", "--gpu"), (f"{NAME} more", "more"), (f"{NAME} --json", "--json")],
)
def test_the_list_takes_nothing_but_a_recipes_name(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["recipes", *words.split()]) == 2
    assert said in capsys.readouterr().err


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
    named = [(each["name"], each["method"], each["card"], each["what"]) for each in told["recipes"]]
    assert named == [(each.name, each.method, each.card, each.what) for each in recipes()]
    assert all(pathlib.Path(each["path"]).is_file() for each in told["recipes"])


def test_a_recipe_that_is_named_is_printed_as_the_file_that_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["recipes", NAME]) == 0
    assert capsys.readouterr().out == recipe(NAME).path.read_text()
