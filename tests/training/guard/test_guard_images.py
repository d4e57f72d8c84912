"""Micro-batches of rows with images are split with exactly each row's images, or not at all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from datasets import Dataset
from guarded import blocks
from PIL import Image
from test_guard_gradients import assert_same_when, fail_in_backward, fail_in_forward
from tiny import IMAGE_TOKEN, tiny_vision_folder
from tiny_trainers import trainer
from transformers import AutoConfig

from autotrain_mem.rehearsal.model.image_processor import CHAT_TEMPLATE, image_processor, rehearsed_processor
from autotrain_mem.training.guard.attach import Guard

SIZES = [[], [(84, 56)], [(56, 56), (112, 84)], [(60, 90)], [(90, 60), (56, 84)], [(84, 84)], [], [(70, 70)]]
"""Of the images of each row, which are four to a micro-batch: other numbers of other sizes."""

OF_ALL = 1e-7
"""Of the largest number in all gradients: those of a key's bias are nothing but what sums leave."""


def noise(size: tuple[int, int], seed: int) -> Any:
    width, height = size
    return Image.fromarray(numpy.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=numpy.uint8))


def rows(method: str) -> Any:
    """GRPO's all have an image: TRL's cannot make a batch of some that have and some that have not."""
    all_sizes = [sizes or [(56, 56)] * (method == "grpo") for sizes in SIZES]
    images = [[noise(size, seed=10 * row + at) for at, size in enumerate(sizes)] for row, sizes in enumerate(all_sizes)]
    texts = [f"{'t5 ' * (3 + 2 * row % 5)}t6" for row in range(len(SIZES))]
    said = [[{"role": "user", "content": text}] for text in texts]
    answers = [[{"role": "assistant", "content": f" t{3 + row % 4} t7 t4"}] for row in range(len(SIZES))]
    others = [[{"role": "assistant", "content": f" t6{' t3' * (1 + row % 3)}"}] for row in range(len(SIZES))]
    columns = {
        "sft": {"messages": [[*one, *other] for one, other in zip(said, answers, strict=True)]},
        "dpo": {"prompt": said, "chosen": answers, "rejected": others},
    }
    return Dataset.from_dict({**columns.get(method, {"prompt": said}), "images": images})


def processor_of(model: Path, **options: Any) -> Any:
    """Its own image processor, which takes images as they are, around a tokenizer of a few words."""
    made = rehearsed_processor(str(model), AutoConfig.from_pretrained(model), **options)
    made.image_processor = image_processor(str(model))
    # As in real templates, there is a token between two images: Qwen's forward takes a stretch of theirs for one.
    made.chat_template = CHAT_TEMPLATE.replace("PLACEHOLDER", f"{made.image_token} t7")
    return made


OF_METHOD: dict[str, dict[str, Any]] = {
    "sft": {"max_length": None},
    "dpo": {"max_length": None},
    **dict.fromkeys(("grpo", "rloo"), {"generation_kwargs": {"suppress_tokens": [*range(IMAGE_TOKEN, 304)]}}),
}
MADE: dict[tuple[str, str], Any] = {}


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("vision")

    def made(family: str) -> Path:
        return root / family if (root / family).exists() else tiny_vision_folder(root / family, family)

    return made


@contextmanager
def built(method: str, model: Path, **changes: Any) -> Iterator[Any]:
    """One of them for all tests, as it was built."""
    if (method, model.name) not in MADE:
        side = "left" if method in ("grpo", "rloo") else "right"
        given = {"train_dataset": rows(method), "processing_class": processor_of(model, padding_side=side)}
        options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "beta": 0.1}
        options |= OF_METHOD[method] | {"num_generations": 2} if method in ("grpo", "rloo") else OF_METHOD[method]
        if method == "sft":
            del options["beta"]
        MADE[method, model.name] = trainer(method, model, model.parent / "out", build=given, **options)
    made = MADE[method, model.name]
    was = dict(vars(made))
    vars(made).update(changes)
    try:
        yield made
    finally:
        vars(made).clear()
        vars(made).update(was)
        vars(made.model).pop("generate", None)
        made.callback_handler.callbacks = [one for one in made.callback_handler.callbacks if type(one) is not Guard]
        for block in blocks(made):
            block._forward_pre_hooks.clear()


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo", "rloo"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "smolvlm", "llava"])
def test_gradients_of_parts_are_the_whole_micro_batchs(
    family: str, method: str, vision_model: Callable[[str], Path]
) -> None:
    """The first micro-batch fails twice in the forward, and goes through row by row, some of which have no image."""
    with built(method, vision_model(family)) as made:
        told = assert_same_when(made, lambda: fail_in_forward(made, at=[0, 1], layer=-1), of_all=OF_ALL)
    assert [remedy.split(" rows")[0].split(" pairs")[0] for remedy in told.remedies] == [
        "split into 2 + 2",
        "split into 1 + 1",
    ]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_a_backward_that_failed_half_way_is_repeated_in_parts(family: str, vision_model: Callable[[str], Path]) -> None:
    with built("dpo", vision_model(family)) as made:
        told = assert_same_when(made, lambda: fail_in_backward(made, at=[0], layer=-1), of_all=OF_ALL)
    assert told.remedies == ["split into 2 + 2 pairs"]
