"""Of data with images those rows are run first that need most, as the trainer itself tokenizes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, List, Value
from tiny_trainers import outcome
from tiny_vision_trainers import SIZES, rows, vision_trainer

from autotrain_mem.data.longest_rows import longest_image_rows
from autotrain_mem.training.process.longest_batch import LongestBatch, attach_longest_batch, run_longest_batch
from autotrain_mem.training.process.probe import take_longest

Model = Callable[[str], Path]
SHORT = {"max_steps": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 2}


ONE_LARGE, THREE_SMALL = 2, 5
UNEQUAL = [[], [(56, 56)], [(168, 112)], [(56, 56)], [(60, 60)], [(56, 56)] * 3, [], [(58, 58)]]


@pytest.mark.parametrize(("family", "longest"), [("qwen2_5_vl", ONE_LARGE), ("gemma3", THREE_SMALL)])
def test_the_row_of_most_tokens_is_found_whatever_a_model_makes_of_pixels(
    family: str, longest: int, vision_folder: Model, tmp_path: Path
) -> None:
    """Qwen's tokens follow the pixels; Gemma makes as many of each image."""
    made = vision_trainer("sft", vision_folder(family), tmp_path)
    data = rows("sft", UNEQUAL)
    tokens = [made.data_collator([data[number]])["input_ids"].shape[1] for number in range(len(data))]
    assert longest_image_rows(made, data, 1) == ([longest], max(tokens))
    assert [tokens[number] for number in longest_image_rows(made, data, 3)[0]] == sorted(tokens)[:-4:-1]


def test_a_training_with_images_is_the_same_to_the_bit_with_and_without_them_first(
    vision_folder: Model, tmp_path: Path
) -> None:
    told: list[LongestBatch] = []
    outcomes = []
    for is_first in (False, True):
        made = vision_trainer("grpo", vision_folder("qwen2_5_vl"), tmp_path, **SHORT)
        if is_first:
            attach_longest_batch(made, told.append)
        made.train()
        outcomes.append(outcome(made))
    assert outcomes[0] == outcomes[1]
    (batch,) = told
    assert not batch.why_not
    assert batch.rows == 2
    assert batch.longest_tokens > 20


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_probe_is_left_the_longest_rows_with_images(method: str, vision_folder: Model, tmp_path: Path) -> None:
    made = vision_trainer(method, vision_folder("qwen2_5_vl"), tmp_path, **SHORT)
    (longest, *_), tokens = longest_image_rows(made, made.train_dataset, 1)
    assert take_longest(made) == tokens
    sizes = [[image.size for image in row["images"]] for row in made.train_dataset]
    assert sizes[0] == SIZES[longest] == SIZES[2]


def test_rows_whose_images_cannot_be_read_are_not_run_first(vision_folder: Model, tmp_path: Path) -> None:
    made = vision_trainer("sft", vision_folder("qwen2_5_vl"), tmp_path)
    columns = {"messages": made.train_dataset["messages"][:], "images": [["https://a.b/c.png"]] * len(SIZES)}
    made.train_dataset = Dataset.from_dict(columns).cast_column("images", List(Value("string")))

    def step(*_: Any) -> torch.Tensor:
        raise AssertionError

    batch = run_longest_batch(made, made.model, step)
    assert batch.why_not == "An image of row 1 cannot be read: https://a.b/c.png is on another machine"
