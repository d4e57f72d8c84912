"""Counted lengths are those of the rows that the real trainer trains on, in one process and in several."""

import json
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from autotrain_mem.data import load
from autotrain_mem.data.token_lengths import load_tokenizer, profile
from autotrain_mem.methods.configs import on_cpu
from autotrain_mem.methods.interface import method_of
from autotrain_mem.methods.row_lengths import smallest_model
from autotrain_mem.settings.words import without_maximized
from autotrain_mem.types import Counting, Job

Folder = Callable[[str], pathlib.Path]

QUESTIONS = ("What is 4 + 5?", "Ann has 3 apples and Ben has 12. How many are there?", "2 * 2?")
ANSWERS = ("9", "There are 15 apples in all, since 3 + 12 = 15.", "It is 4.")


def turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


MESSAGES = [{"messages": [turn("user", q), turn("assistant", a)]} for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
TEXTS = [{"text": q + a, "story": a} for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
COMPLETIONS = [{"prompt": q, "completion": a} for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
SPOKEN = [
    {"prompt": [turn("user", q)], "completion": [turn("assistant", a)]} for q, a in zip(QUESTIONS, ANSWERS, strict=True)
]
PAIRS = [{"prompt": q, "chosen": a, "rejected": a[:3]} for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
TOKENS = [{"input_ids": [1] * length} for length in (3, 9, 9)]
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} done"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


def written(path: pathlib.Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def job_of(folder: Folder, data: str, method: str = "sft", **arguments: Any) -> Job:
    return Job(method=method, model=str(folder("qwen2")), dataset=data, arguments=arguments)


def trained_lengths(job: Job, scratch: pathlib.Path) -> Counter[int]:
    """Of the rows that TRL's SFTTrainer hands to its collator when nobody interferes."""
    from trl import SFTTrainer

    given = {**on_cpu(without_maximized(job.arguments)), "report_to": "none", "output_dir": str(scratch)}
    filled = method_of("sft").configs({"max_length": None, **given})
    split = load.load(job, filled)["train"]
    tokenizer = load_tokenizer(job.model)
    made = SFTTrainer(model=smallest_model(), args=filled.training, train_dataset=split, processing_class=tokenizer)
    return Counter(len(ids) for ids in made.train_dataset["input_ids"])


@pytest.mark.parametrize(
    ("rows", "arguments"),
    [
        (MESSAGES, {}),
        (MESSAGES, {"assistant_only_loss": True, "chat_template_path": "TEMPLATE"}),
        (TEXTS, {}),
        (TEXTS, {"dataset_text_field": "story"}),
        (TEXTS, {"eos_token": "<|im_start|>"}),
        (COMPLETIONS, {}),
        (COMPLETIONS, {"completion_only_loss": False}),
        (SPOKEN, {}),
        (TOKENS, {}),
    ],
    ids=[
        *("chat", "assistant only", "text", "other column", "other end", "completions", "whole loss"),
        *("spoken completions", "tokenized"),
    ],
)
def test_the_lengths_are_those_of_the_rows_that_the_trainer_makes(
    rows: list[dict[str, Any]], arguments: Mapping[str, Any], model_folder: Folder, tmp_path: pathlib.Path
) -> None:
    template = tmp_path / "other.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    given = {name: str(template) if value == "TEMPLATE" else value for name, value in arguments.items()}
    job = job_of(model_folder, written(tmp_path / "rows.jsonl", rows), **given)
    assert profile(job, str(tmp_path)).rows_by_length == trained_lengths(job, tmp_path)


@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_the_tokens_of_pairs_are_those_of_both_sequences(
    method: str, model_folder: Folder, tmp_path: pathlib.Path
) -> None:
    found = profile(job_of(model_folder, written(tmp_path / "rows.jsonl", PAIRS), method), str(tmp_path))
    tokenizer = load_tokenizer(str(model_folder("qwen2")))
    end = tokenizer.eos_token
    lengths = [
        [len(tokenizer(row["prompt"] + row[side] + end)["input_ids"]) for side in ("chosen", "rejected")]
        for row in PAIRS
    ]
    assert found.rows_by_length == Counter(map(max, lengths))
    assert found.tokens == sum(map(sum, lengths))
    assert found.drops is (method == "reward")


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_several_processes_count_the_same_as_one(method: str, model_folder: Folder, tmp_path: pathlib.Path) -> None:
    rows = [
        {**row, "prompt": f"{row['prompt']} {index}"}
        for index in range(4)
        for row in (PAIRS if method == "dpo" else COMPLETIONS)
    ]
    data = written(tmp_path / "rows.jsonl", rows)
    one, two = (
        profile(job_of(model_folder, data, method, dataset_num_proc=number), str(tmp_path)) for number in (1, 2)
    )
    assert one == two
    assert one.rows == 12


def test_the_counting_tells_how_far_it_is(model_folder: Folder, tmp_path: pathlib.Path) -> None:
    told: list[Counting] = []
    rows = [{"text": f"{index} and {index + 1}"} for index in range(50)]
    profile(job_of(model_folder, written(tmp_path / "rows.jsonl", rows)), str(tmp_path), told.append)
    tokenizing = [each for each in told if each.doing.startswith("Tokenizing")]
    assert [(each.done, each.rows) for each in (tokenizing[0], tokenizing[-1])] == [(0, 50), (50, 50)]
    assert not [each for each in told if each.doing.startswith("Building labels")]
