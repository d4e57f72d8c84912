"""Trainers of models of two layers that read images, on rows with other numbers of images of other sizes."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy
from datasets import Dataset
from PIL import Image
from tiny import IMAGE_TOKEN
from tiny_trainers import trainer
from transformers import AutoConfig

from autotrain_mem.rehearsal.stub_processor import rehearsed_processor
from autotrain_mem.trainers.pretrained import image_processor

SIZES = [[(84, 56)], [], [(56, 56), (112, 84)], [(60, 90)], [(90, 60), (56, 84)], [(84, 84)], [(70, 70)], []]
"""Of the images of each row, four of which are a micro-batch."""


def noise(size: tuple[int, int], seed: int) -> Any:
    width, height = size
    return Image.fromarray(numpy.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=numpy.uint8))


def rows(method: str, sizes_of_rows: Sequence[Sequence[tuple[int, int]]] = SIZES) -> Any:
    """GRPO's all have an image: TRL's cannot make a batch of some that have and some that have not."""
    all_sizes = [sizes or [(56, 56)] * (method == "grpo") for sizes in sizes_of_rows]
    images = [[noise(size, seed=10 * row + at) for at, size in enumerate(sizes)] for row, sizes in enumerate(all_sizes)]
    texts = [f"{'t5 ' * (3 + 2 * row % 5)}t6" for row in range(len(all_sizes))]
    said = [[{"role": "user", "content": text}] for text in texts]
    answers = [[{"role": "assistant", "content": f" t{3 + row % 4} t7 t4"}] for row in range(len(all_sizes))]
    others = [[{"role": "assistant", "content": f" t6{' t3' * (1 + row % 3)}"}] for row in range(len(all_sizes))]
    columns = {
        "sft": {"messages": [[*one, *other] for one, other in zip(said, answers, strict=True)]},
        "dpo": {"prompt": said, "chosen": answers, "rejected": others},
    }
    return Dataset.from_dict({**columns.get(method, {"prompt": said}), "images": images})


NO_IMAGE_TOKENS = {"suppress_tokens": [*range(IMAGE_TOKEN, IMAGE_TOKEN + 4)]}
OF_METHOD: dict[str, dict[str, Any]] = {
    "sft": {"max_length": None},
    "dpo": {"max_length": None, "beta": 0.1},
    **{name: {"beta": 0.1, "generation_kwargs": NO_IMAGE_TOKENS} for name in ("grpo", "rloo")},
}


def vision_trainer(method: str, model: pathlib.Path, folder: pathlib.Path, **changes: Any) -> Any:
    side = "left" if method in ("grpo", "rloo") else "right"
    words = rehearsed_processor(str(model), AutoConfig.from_pretrained(model), padding_side=side)
    words.image_processor = image_processor(str(model))  # its own, which takes images as they are
    given = {"train_dataset": rows(method), "processing_class": words}
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    return trainer(method, model, folder, build=given, **(sizes | OF_METHOD[method] | changes))
