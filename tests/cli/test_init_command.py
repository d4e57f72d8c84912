"""What a config is made of, and what is asked."""

import pathlib
from typing import Any

import pytest

from autotrain_mem.cli import init as module
from autotrain_mem.cli.init import Answers, answered, config_text, init
from autotrain_mem.support.errors import AutofitError, DatasetError, OutputFolderError, UsageError
from autotrain_mem.support.yaml_files import read_yaml
from autotrain_mem.types.methods_table import METHODS, methods_reading


def test_the_columns_tell_the_method() -> None:
    for columns, method in {
        ("messages",): "sft",
        ("text", "url"): "sft",
        ("prompt", "completion"): "sft",
        ("prompt", "completion", "label"): "kto",
        ("prompt", "chosen", "rejected"): "dpo",
        ("prompt", "answer"): "grpo",
    }.items():
        assert methods_reading(columns)[0] == method
    assert methods_reading(("a", "b")) == ()
    assert set(methods_reading(["input_ids", "prompt", "chosen", "rejected"])) <= METHODS.keys()


def test_data_are_looked_at_as_a_training_loads_them(tmp_path: pathlib.Path) -> None:
    def looked_at(name: str) -> Answers:
        return answered("m", str(tmp_path / name), None, None, lambda question, default: default)

    (tmp_path / "c.csv").write_text("prompt,completion\na,b\nc,d\n")
    assert (looked_at("c.csv").columns, looked_at("c.csv").rows) == (("prompt", "completion"), 2)
    (tmp_path / "none.jsonl").write_text("")
    for name in ("none.jsonl", "gone.parquet"):
        with pytest.raises(DatasetError):
            looked_at(name)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gpu", ["l4", None])
def test_a_config_is_a_dozen_lines_that_say_what_was_answered(
    method: str, gpu: str | None, tmp_path: pathlib.Path
) -> None:
    answers = Answers(method=method, model="no", dataset="a: b.jsonl", columns=("text",), rows=2, gpu=gpu, here=None)
    text = config_text(answers, "my file.yaml")
    (tmp_path / "c.yaml").write_text(text)
    keys = read_yaml(str(tmp_path / "c.yaml"), "--config")
    assert (keys["model_name_or_path"], keys["dataset_name"]) == ("no", "a: b.jsonl")
    assert keys["autofit"].get("gpu") == gpu
    assert 10 <= len(text.splitlines()) <= 14
    assert f"plan {method} --config 'my file.yaml'{'' if gpu else ' --gpu NAME'}" in text


def test_what_is_off_can_be_turned_on(tmp_path: pathlib.Path) -> None:
    """A rate that YAML takes for text would be refused."""
    answers = Answers(method="dpo", model="m", dataset="d", columns=(), rows=None, gpu=None, here="L4, 22.0 GiB")
    (tmp_path / "c.yaml").write_text(config_text(answers, "c.yaml").replace("# learning", "learning"))
    assert read_yaml(str(tmp_path / "c.yaml"), "--config")["learning_rate"] == 1e-6


def test_nobody_is_asked_where_nobody_is_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module.api, "detect", lambda *_: ())
    with pytest.raises(UsageError, match="needs --dataset"):
        init(["--model", "m"])
    (tmp_path / "odd.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(AutofitError, match="those of no method"):
        init(["--model", "m", "--dataset", "odd.jsonl"])
    assert not (tmp_path / "autofit.yaml").exists()
    (tmp_path / "d.jsonl").write_text('{"prompt": "", "chosen": "", "rejected": ""}\n')
    words = ["--model", "m", "--dataset", "d.jsonl"]
    assert init(words) == 0
    assert "autofit plan dpo --config autofit.yaml --gpu NAME" in capsys.readouterr().out
    with pytest.raises(OutputFolderError, match="not written over"):
        init(words)


def test_on_a_terminal_what_is_missing_is_asked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    monkeypatch.setattr(module.api, "detect", lambda *_: ())
    replies = {"Model": "", "Data": str(tmp_path / "d.jsonl")}
    asked = answered(None, None, None, None, lambda question, default: replies[question[:5].rstrip(",")] or default)
    assert (asked.method, asked.model) == ("sft", module.MODEL)
