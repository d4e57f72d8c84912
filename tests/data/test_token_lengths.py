"""Counted lengths are those of the rows that the real trainer trains on, in one process and in several; and the
rows that are run first: in order, padded as the run pads them, again where they are too few."""

import json
import pathlib
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from PIL import Image
from tiny import VISION_FAMILIES
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from autotrain_mem.data import load
from autotrain_mem.data.longest_rows import cut, longest_rows, repeated
from autotrain_mem.data.token_lengths import load_tokenizer, profile
from autotrain_mem.methods.configs import on_cpu
from autotrain_mem.methods.interface import method_of
from autotrain_mem.methods.row_lengths import counting_maps, smallest_model
from autotrain_mem.settings.words import without_maximized
from autotrain_mem.support.errors import DatasetFormatError
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


def job_of(folder: Folder, data: str, method: str = "sft", family: str = "qwen2", **arguments: Any) -> Job:
    return Job(method=method, model=str(folder(family)), dataset=data, arguments=arguments)


def trained_lengths(job: Job, scratch: pathlib.Path) -> Counter[int]:
    """Of the rows that TRL's SFTTrainer hands to its collator when nobody interferes."""
    from trl import SFTTrainer

    given = {**on_cpu(without_maximized(job.arguments)), "report_to": "none", "output_dir": str(scratch)}
    filled = method_of("sft").configs({"max_length": None, **given})
    split = load.load(job, filled)["train"]
    tokenizer = load_tokenizer(job.model)
    made = SFTTrainer(model=smallest_model(), args=filled.training, train_dataset=split, processing_class=tokenizer)
    return Counter(len(ids) for ids in made.train_dataset["input_ids"])


ROWS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "chat": (MESSAGES, {}),
    "assistant only": (MESSAGES, {"assistant_only_loss": True, "chat_template_path": "TEMPLATE"}),
    "text": (TEXTS, {}),
    "other column": (TEXTS, {"dataset_text_field": "story"}),
    "other end": (TEXTS, {"eos_token": "<|im_start|>"}),
    "completions": (COMPLETIONS, {}),
    "whole loss": (COMPLETIONS, {"completion_only_loss": False}),
    "spoken completions": (SPOKEN, {}),
    "tokenized": (TOKENS, {}),
}


@pytest.mark.parametrize("kind", ROWS)
def test_the_lengths_are_those_of_the_trainers_rows(kind: str, model_folder: Folder, tmp_path: pathlib.Path) -> None:
    rows, arguments = ROWS[kind]
    template = tmp_path / "other.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    given = {name: str(template) if value == "TEMPLATE" else value for name, value in arguments.items()}
    job = job_of(model_folder, written(tmp_path / "rows.jsonl", rows), **given)
    assert profile(job, str(tmp_path)).rows_by_length == trained_lengths(job, tmp_path)


def test_rows_mapped_in_batches_are_those_that_datasets_maps_one_by_one() -> None:
    more = [{"text": f"row {number}", "part": {"of": [number]}, "odd": number or None} for number in range(2001)]
    rows, seen = datasets.Dataset.from_list(more), set()

    def longer(row: Any, end: str) -> Any:
        seen.add(type(row))
        row["text"], row["length"] = row["text"] + end, row["odd"]
        return row

    plain = rows.map(longer, fn_kwargs={"end": "."}, remove_columns=["odd"])
    with counting_maps(lambda counting: None):
        quick = rows.map(longer, fn_kwargs={"end": "."}, remove_columns=["odd"])
    assert (quick.to_list(), quick.features, dict in seen) == (plain.to_list(), plain.features, True)


def test_a_tokenizer_gives_only_the_ids_of_a_text_while_rows_are_counted(model_folder: Folder) -> None:
    tokenizer, text = load_tokenizer(str(model_folder("qwen2"))), "2 + 2 is <|im_end|> 4"
    plain = [tokenizer(text=text), tokenizer(text=text, truncation=True, max_length=3), tokenizer(text=text)]
    with counting_maps(lambda counting: None):
        quick = [tokenizer(text=text), tokenizer(text=text, truncation=True, max_length=3)]
        quick += [tokenizer(text=text), tokenizer(text=text)]  # the first of them ends the truncation
    assert [[*each] for each in quick] == [["input_ids"], [*plain[0]], [*plain[0]], ["input_ids"]]
    assert [each["input_ids"] for each in quick[:3]] == [each["input_ids"] for each in plain]
    assert quick[3] == quick[0] != quick[1]


@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_pairs_have_the_tokens_of_both_sequences(method: str, model_folder: Folder, tmp_path: pathlib.Path) -> None:
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
    some = PAIRS if method == "dpo" else COMPLETIONS
    rows = [{**row, "prompt": f"{row['prompt']} {index}"} for index in range(4) for row in some]
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


def test_longest_rows_come_in_order_again_where_they_are_too_few_and_with_a_shorter_one_in_a_padded_batch() -> None:
    """Without padding there is no mask, and it takes less than a batch of the run that has one."""
    assert (longest_rows([3, 9, 1, 9, 4], 3), longest_rows([3], 8)) == ([1, 3, 4], [0])
    assert repeated([1, 0], 5) == [1, 0, 1, 0, 1]
    assert longest_rows([9, 5, 9, 6], 2, padded=True) == [0, 3]
    assert longest_rows([9, 9], 2, padded=True) == [0, 1]
    assert longest_rows([9, 8, 7], 2, padded=True) == [0, 1]
    assert longest_rows([9, 8], 1, padded=True) == [0]
    cut_by_the_collator = cut([12, 11, 9, 6], SimpleNamespace(max_length=9))
    assert longest_rows(cut_by_the_collator, 2, padded=True) == [0, 3]


# Tokens of rows with images are those that TRL's own collators make, though no image is decoded.

SIZES = ((64, 56), (30, 200), (300, 40), (200, 190))
IMAGES = ([0], [1, 2], [], [3], [2, 0, 1])


@pytest.fixture
def pictures(tmp_path: pathlib.Path) -> list[str]:
    paths = [str(tmp_path / f"{number}.png") for number in range(len(SIZES))]
    for path, size in zip(paths, SIZES, strict=True):
        Image.new("RGB", size).save(path)
    return paths


FRUITS = [turn("assistant", "10 fruits.")]
MADE: dict[str, tuple[str, dict[str, Any], Any]] = {
    "messages": ("sft", {"messages": FRUITS}, DataCollatorForVisionLanguageModeling),
    "completion": ("sft", {"completion": FRUITS}, DataCollatorForVisionLanguageModeling),
    "pair": (
        "dpo",
        {"chosen": FRUITS, "rejected": [turn("assistant", "No fruit at all, I think.")]},
        DataCollatorForVisionPreference,
    ),
}


def pictured(pictures: list[str], answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Questions about images, with this answer: within the conversation, or beside the prompt."""
    words = ("How many pears?", "7 apples\n", "", "What is 3 + 4?\n\n", "x " * 40)
    rows = []
    for numbers, text in zip(IMAGES, words, strict=True):
        prompt = [turn("user", text)]
        asked = {"messages": prompt + answer["messages"]} if "messages" in answer else {"prompt": prompt, **answer}
        rows.append({"images": [pictures[number] for number in numbers], **asked})
    return rows


@pytest.mark.parametrize(
    ("kind", "family"),
    [*(("messages", family) for family in VISION_FAMILIES), ("completion", "gemma3"), ("pair", "qwen2_5_vl")],
)
def test_a_row_has_the_tokens_that_trls_collator_makes_of_it(
    kind: str, family: str, vision_folder: Folder, pictures: list[str], tmp_path: pathlib.Path
) -> None:
    method, answer, collator = MADE[kind]
    rows = pictured(pictures, answer)
    job = job_of(vision_folder, written(tmp_path / "rows.jsonl", rows), method, family)
    found = profile(job, str(tmp_path))
    collate = collator(processor=load_tokenizer(job.model))
    batches = [collate([dict(row)]) for row in pictured(pictures, answer)]
    assert found.rows_by_length == Counter(len(batch["input_ids"][0]) for batch in batches)
    assert found.images is not None
    mark = collate.processor.tokenizer.image_token_id
    marks = [batch["input_ids"][0] == mark for batch in batches]
    assert found.images.rows_by_image_tokens == Counter(int(each.sum()) for each in marks)
    ends = [int(each.nonzero().max()) + 1 if each.any() else 0 for each in marks]
    assert found.images.rows_by_end == Counter(ends)
    elements = [0 if "pixel_values" not in batch else batch["pixel_values"].numel() for batch in batches]
    worst = IMAGES[max(range(len(rows)), key=elements.__getitem__)]
    assert sorted(found.images.worst) == sorted(f"{SIZES[each][0]}x{SIZES[each][1]}" for each in worst)


def test_images_for_a_text_model_and_prompts_of_which_some_have_no_image_are_refused(
    model_folder: Folder, vision_folder: Folder, pictures: list[str], tmp_path: pathlib.Path
) -> None:
    data = written(tmp_path / "rows.jsonl", pictured(pictures, {"messages": FRUITS}))
    with pytest.raises(DatasetFormatError, match="reads only text"):
        profile(job_of(model_folder, data), str(tmp_path))
    data = written(tmp_path / "rows.jsonl", pictured(pictures, {}))
    job = job_of(vision_folder, data, "grpo", "gemma3", reward_funcs=["accuracy_reward"])
    with pytest.raises(DatasetFormatError, match=r"1 of the 5 rows of .* have no image"):
        profile(job, str(tmp_path))
