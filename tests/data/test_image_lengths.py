"""Tokens of rows with images are those that TRL's own collators make, though no image is decoded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny import VISION_FAMILIES
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from autotrain_mem.data.token_lengths import load_tokenizer, profile
from autotrain_mem.support.errors import DatasetFormatError
from autotrain_mem.types import Job

SIZES = ((64, 56), (30, 200), (300, 40), (200, 190))
IMAGES = ([0], [1, 2], [], [3], [2, 0, 1])


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / f"{number}.png") for number in range(len(SIZES))]
    for path, size in zip(paths, SIZES, strict=True):
        Image.new("RGB", size).save(path)
    return paths


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def asked(pictures: list[str]) -> list[dict[str, Any]]:
    words = ("How many pears?", "7 apples\n", "", "What is 3 + 4?\n\n", "x " * 40)
    return [
        {"images": [pictures[number] for number in numbers], "prompt": [said("user", text)]}
        for numbers, text in zip(IMAGES, words, strict=True)
    ]


def conversations(pictures: list[str]) -> list[dict[str, Any]]:
    return [
        {"images": row["images"], "messages": [*row["prompt"], said("assistant", "10 fruits.")]}
        for row in asked(pictures)
    ]


def completed(pictures: list[str]) -> list[dict[str, Any]]:
    return [{**row, "completion": [said("assistant", "10 fruits.")]} for row in asked(pictures)]


def pairs(pictures: list[str]) -> list[dict[str, Any]]:
    sides = {"chosen": [said("assistant", "10.")], "rejected": [said("assistant", "No fruit at all, I think.")]}
    return [{**row, **sides} for row in asked(pictures)]


MADE = {
    "messages": ("sft", conversations, DataCollatorForVisionLanguageModeling),
    "completion": ("sft", completed, DataCollatorForVisionLanguageModeling),
    "pair": ("dpo", pairs, DataCollatorForVisionPreference),
}


@pytest.mark.parametrize(
    ("kind", "family"),
    [*(("messages", family) for family in VISION_FAMILIES), ("completion", "gemma3"), ("pair", "qwen2_5_vl")],
)
def test_a_row_has_the_tokens_that_trls_collator_makes_of_it(
    kind: str, family: str, vision_folder: Callable[[str], Path], pictures: list[str], tmp_path: Path
) -> None:
    method, make, collator = MADE[kind]
    rows, file = make(pictures), tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = vision_folder(family)
    found = profile(Job(method=method, model=str(model), dataset=str(file)), str(tmp_path))
    collate = collator(processor=load_tokenizer(str(model)))
    batches = [collate([dict(row)]) for row in make(pictures)]
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
    model_folder: Callable[[str], Path], vision_folder: Callable[[str], Path], pictures: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(conversations(pictures)[0]) + "\n")
    with pytest.raises(DatasetFormatError, match="reads text alone"):
        profile(Job(method="sft", model=str(model_folder("qwen2")), dataset=str(file)), str(tmp_path))
    file.write_text("".join(json.dumps(row) + "\n" for row in asked(pictures)))
    arguments = {"reward_funcs": ["accuracy_reward"]}
    job = Job(method="grpo", model=str(vision_folder("gemma3")), dataset=str(file), arguments=arguments)
    with pytest.raises(DatasetFormatError, match=r"1 of the 5 rows of .* have no image"):
        profile(job, str(tmp_path))
