"""What a script hands over is counted and rehearsed as the trainer would take it."""

import errno
import pathlib
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from datasets import Dataset
from peft import LoraConfig
from tiny import tiny_config
from trl import SFTConfig, SFTTrainer

from autotrain_mem.data import fingerprint
from autotrain_mem.data.token_lengths import load_tokenizer, profile
from autotrain_mem.methods.row_lengths import smallest_model
from autotrain_mem.rehearsal.truncated_depth import pattern_of
from autotrain_mem.support.errors import DatasetFormatError, OutputFolderError, UsageError
from autotrain_mem.trainers import script_call
from autotrain_mem.trainers.script_call import Call
from autotrain_mem.types import Job, PythonCall

Make = Callable[..., Job]


@pytest.fixture
def make_job(qwen: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """``make_job(train_dataset=..., arguments={...})``: a job from Python with these keywords of TRL's trainer."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def made(*, method: str = "sft", arguments: dict[str, Any] | None = None, **keywords: Any) -> Job:
        folder = tmp_path / f"call{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        model = str(qwen)
        every = {"model": model, **keywords}
        path = script_call.write(Call(trainer=object, args=(), kwargs=every, keywords=every), folder)
        facts = PythonCall(path=path, holds_model=False, holds_rows=True, digest="")
        return Job(method=method, model=model, dataset=None, arguments=arguments or {}, python_call=facts)

    return made


def rows(**columns: Any) -> Any:
    return Dataset.from_dict(columns)


def chats(*words: str) -> Any:
    return rows(
        messages=[[{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}] for text in words]
    )


NAMES = ["Ann", "Bartholomew"]
FORMATTED: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "conversations, which it does not change": ({}, lambda: chats("What is it? " * 20, "Who?")),
    "columns of no format": ({}, lambda: rows(name=NAMES)),
    "another column of text": (
        {"dataset_text_field": "story"},
        lambda: rows(name=NAMES, story=["One.", "Once more."]),
    ),
}


@pytest.mark.parametrize("kind", FORMATTED)
def test_formatted_rows_are_counted_as_the_trainer_does(kind: str, make_job: Make, tmp_path: pathlib.Path) -> None:
    arguments, data = FORMATTED[kind]
    handed = {"train_dataset": data(), "formatting_func": lambda row: f"{row.get('name', 'a row')}! " * 9}
    job = make_job(**handed, arguments=arguments)
    config = SFTConfig(str(tmp_path / "out"), use_cpu=True, report_to="none", max_length=None, **arguments)
    trainer = SFTTrainer(smallest_model(), config, **handed, processing_class=load_tokenizer(job.model))
    trained = Counter(len(ids) for ids in trainer.train_dataset["input_ids"])
    assert profile(job, str(tmp_path / "scratch")).rows_by_length == trained


def test_a_mended_function_is_counted(make_job: Make, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "some_formats.py"
    source.write_text("def plain(row):\n    return row['text']\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    import some_formats  # type: ignore[import-not-found]

    job = make_job(train_dataset=rows(text=["a", "b"]), formatting_func=some_formats.plain)
    before = fingerprint.fingerprint(job, str(tmp_path / "scratch"))
    assert fingerprint.fingerprint(job, str(tmp_path / "scratch")) == before
    source.write_text("def plain(row):\n    return row['text'] * 9\n", encoding="utf-8")
    assert fingerprint.fingerprint(job, str(tmp_path / "scratch")) != before


def test_evaluation_data_of_several_formats_count_with_their_longest_row_and_what_is_wrong_is_said_of_these(
    make_job: Make, tmp_path: pathlib.Path
) -> None:
    chat, texts, evaluates = chats("Which of them? " * 9), rows(text=["a few words"]), {"eval_strategy": "steps"}
    job = make_job(train_dataset=texts, eval_dataset={"a": texts, "b": chat}, arguments=evaluates)
    alone = profile(make_job(train_dataset=chat), str(tmp_path / "scratch"))
    assert profile(job, str(tmp_path / "scratch")).longest_evaluated == alone.longest > 20
    bad = rows(text=["fine", None])
    for evaluated, said in (
        (bad, "eval_dataset cannot"),
        ({"a": texts, "b": bad}, r"eval_dataset\['b'\] cannot"),
        (None, "given no eval_dataset"),
    ):
        job = make_job(train_dataset=texts, eval_dataset=evaluated, arguments=evaluates)
        with pytest.raises(DatasetFormatError, match=said):
            profile(job, str(tmp_path / "scratch"))


def test_a_formatting_function_that_fails_or_is_beside_images_is_named(make_job: Make, tmp_path: pathlib.Path) -> None:
    def silent(row: dict[str, Any]) -> None:
        """Returns no text."""

    seen = rows(text=["a few words"], images=[["file.png"]])
    with pytest.raises(DatasetFormatError, match="not with formatting_func") as raised:
        profile(make_job(train_dataset=seen, formatting_func=silent), str(tmp_path / "scratch"))
    assert "train_dataset = train_dataset.remove_columns(['images'])" in str(raised.value.hint)
    pairs = rows(prompt=["Who?"], chosen=["I"], rejected=["you"], images=[["file.png"]])
    counted = profile(make_job(method="reward", train_dataset=pairs), str(tmp_path / "scratch"))
    assert counted.rows == 1, "a reward model does not look at images"
    job = make_job(train_dataset=rows(name=["Ann"]), formatting_func=silent)
    with pytest.raises(DatasetFormatError, match="TRL cannot prepare train_dataset") as raised:
        profile(job, str(tmp_path / "scratch"))
    assert "formatting_func" in str(raised.value.hint)


def test_layers_repeat_where_all_are_adapted(make_job: Make) -> None:
    for adapter, repeats in (
        ({"target_modules": ["q_proj", "fc1"]}, True),
        ({"target_modules": r".*\.(q|v)_proj"}, True),
        ({"target_modules": ["q_proj"], "layers_to_transform": [6, 7]}, False),
        ({"target_modules": ["q_proj"], "layers_to_transform": 0}, False),
        ({"target_modules": ["q_proj"], "rank_pattern": {"layers.7.self_attn.q_proj": 64}}, False),
        ({"target_modules": ["layers.7.self_attn.q_proj"]}, False),
        ({"target_modules": r".*layers\.[67]\..*_proj"}, False),
    ):
        config = tiny_config("qwen2")
        config.num_hidden_layers, config.layer_types = 8, ["full_attention"] * 8
        asked = {"use_peft": True, "lora_target_modules": [r".*layers\.7\..*_proj"]}
        by_flags = [Job(method="sft", model="a model", dataset=None, arguments=given) for given in ({}, asked)]
        in_python = pattern_of(make_job(peft_config=LoraConfig(**adapter)), config)
        assert (in_python is not None) is repeats, adapter
        assert [pattern_of(job, config) is not None for job in by_flags] == [True, False], adapter


def test_a_full_disk_is_told_with_the_folder_and_the_cure(tmp_path: pathlib.Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch.object(pathlib.Path, "write_bytes", side_effect=full), pytest.raises(OutputFolderError) as raised:
        script_call.write(Call(trainer=object, args=(), kwargs={}, keywords={"model": "a name"}), tmp_path)
    assert f"{tmp_path}/call: the disk is full" in raised.value.message
    assert "TMPDIR a folder on another disk" in raised.value.hint


def test_a_model_without_a_name_needs_its_tokenizer(qwen: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model = smallest_model()
    model.config._name_or_path = ""
    keywords = {"model": model}
    call = Call(trainer=object, args=(), kwargs={}, keywords=keywords)
    with pytest.raises(UsageError, match="processing_class is not given"):
        script_call.write(call, tmp_path)
    assert list(tmp_path.iterdir()) == []
    keywords["processing_class"] = load_tokenizer(str(qwen))
    assert script_call.write(call, tmp_path)
