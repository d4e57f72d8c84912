"""The digest changes with whatever changes the counted lengths, and with nothing else."""

import json
import pathlib
import shutil
from dataclasses import replace
from typing import Any

import pytest

from autotrain_mem.data import fingerprint as module
from autotrain_mem.data.fingerprint import fingerprint
from autotrain_mem.types import Job

ROWS = [{"prompt": f"{index} + 1?", "completion": str(index + 1), "chosen": "a", "rejected": "b"} for index in range(9)]


@pytest.fixture
def job(qwen: pathlib.Path, tmp_path: pathlib.Path) -> Job:
    """A job whose model and data are the test's own, to be changed."""
    model = shutil.copytree(qwen, tmp_path / "model")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return Job(method="sft", model=str(model), dataset=str(data))


def digest(job: Job, tmp_path: pathlib.Path) -> str:
    return fingerprint(job, str(tmp_path / "scratch")).digest


def given(job: Job, **arguments: Any) -> Job:
    return replace(job, arguments={**job.arguments, **arguments})


def test_other_data_tokenizers_and_templates_differ_and_weights_do_not(job: Job, tmp_path: pathlib.Path) -> None:
    (tmp_path / "template.jinja").write_text("{{ messages }}", encoding="utf-8")
    asked = given(job, chat_template_path=str(tmp_path / "template.jinja"))
    counted = ("rows.jsonl", "model/tokenizer.json", "model/chat_template.jinja", "template.jinja")
    for name in (*counted, "model/model.safetensors"):
        before = digest(asked, tmp_path)
        assert digest(asked, tmp_path) == before
        path = tmp_path / name
        path.write_bytes(path.read_bytes().replace(b"1", b"2", 1) + b" ")
        assert (digest(asked, tmp_path) != before) is (name in counted), name


def test_other_formatting_and_versions_have_another_and_what_comes_after_counting_has_not(
    job: Job, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(job, tmp_path)
    formatted = {"dataset_text_field": "completion", "eos_token": "<|im_start|>", "assistant_only_loss": True}
    for name, value in {**formatted, "dataset_train_split": "test", "eval_strategy": "steps"}.items():
        assert digest(given(job, **{name: value}), tmp_path) != before, name
    for name, value in {"max_length": 9, "packing": True, "learning_rate": 0.5, "dataset_num_proc": 2}.items():
        assert digest(given(job, **{name: value}), tmp_path) == before, name
    assert digest(given(job, max_length="p99"), tmp_path) == before
    pairs = replace(job, method="reward")  # a length may drop every pair
    assert digest(given(pairs, max_length=9), tmp_path) != digest(pairs, tmp_path)
    monkeypatch.setattr(module, "versions_key", lambda: {"trl": "99"})
    assert digest(job, tmp_path) != before


def test_a_mended_reward_function_differs(job: Job, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "some_rewards.py"
    source.write_text("def short(completions, **_):\n    return [0.0 for _ in completions]\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = given(replace(job, method="grpo"), reward_funcs=["some_rewards.short"])
    before = digest(asked, tmp_path)
    assert before == digest(asked, tmp_path)
    source.write_text(source.read_text(encoding="utf-8") + "# mended\n", encoding="utf-8")
    assert digest(asked, tmp_path) != before


def test_a_large_file_has_a_date_and_ends(job: Job, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_WHOLE_BYTES", 10)
    monkeypatch.setattr(module, "_END_BYTES", 4)
    before = digest(job, tmp_path)
    assert digest(job, tmp_path) == before
    data = pathlib.Path(str(job.dataset))
    data.write_text(data.read_text(encoding="utf-8"), encoding="utf-8")  # the same content, written later
    assert digest(job, tmp_path) != before


@pytest.mark.parametrize("as_object", [False, True])
def test_an_image_that_changed_under_its_name_is_asked_for(as_object: bool, job: Job, tmp_path: pathlib.Path) -> None:
    assert not fingerprint(job, str(tmp_path / "scratch")).names_files
    image, within = tmp_path / "0.png", tmp_path / "1.png"
    for path in (image, within):
        path.write_bytes(b"an image")
    named = {"bytes": None, "path": str(image)} if as_object else str(image)
    inner = [{"type": "image", "image": str(within)}, {"type": "text", "text": "?"}]
    messages = [{"role": "user", "content": inner if not as_object else "?"}, {"role": "assistant", "content": "!"}]
    pathlib.Path(str(job.dataset)).write_text(json.dumps({"messages": messages, "images": [named]}))
    before = fingerprint(job, str(tmp_path / "scratch"))
    assert before.names_files
    assert digest(job, tmp_path) == before.digest
    for changed in (image,) if as_object else (image, within):
        last = digest(job, tmp_path)
        changed.write_bytes(b"another image")
        assert digest(job, tmp_path) != last
