"""Micro-batches of rows with images are split with exactly each row's images, or not at all."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import Faults, Told, as_built, fail_in_forward, failing
from test_guard_gradients import assert_same_when, micro_steps
from tiny import IMAGE_TOKEN
from tiny_vision_trainers import vision_trainer

from autotrain_mem.training.guard.attach import attach_guard
from autotrain_mem.training.guard.batch_split import Layout, Piece, image_token_of
from autotrain_mem.types import LearnedLimits

OF_ALL = 1e-7
"""Of the largest number in all gradients: those of a key's bias are nothing but what sums leave."""


@functools.cache
def built(method: str, model: Path) -> Any:
    return vision_trainer(method, model, model.parent / "out")


FAMILY_AND_METHOD = [
    *(("qwen2_5_vl", "dpo"), ("gemma3", "dpo"), ("smolvlm", "dpo")),
    *(("smolvlm", "grpo"), ("llava", "sft")),
]
"""Every layout of images with pairs, whose halves share them; every kind of method at least once."""


@pytest.mark.parametrize(("family", "method"), FAMILY_AND_METHOD)
def test_gradients_of_parts_are_the_whole_micro_batchs(
    family: str, method: str, vision_folder: Callable[[str], Path]
) -> None:
    """The first micro-batch fails twice in the forward, and goes through row by row, some of which have no image."""
    with as_built(built(method, vision_folder(family))) as made:
        told = assert_same_when(made, lambda: fail_in_forward(made, at=[0, 1], layer=-1), of_all=OF_ALL)
    assert [remedy.split(" rows")[0].split(" pairs")[0] for remedy in told.remedies] == [
        "split into 2 + 2",
        "split into 1 + 1",
    ]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_prompts_are_answered_and_completions_judged_in_parts_as_all_at_once(
    family: str, vision_folder: Callable[[str], Path]
) -> None:
    """Greedily, so that parts draw nothing; the fourth part of each has prompts without an image.

    They have not as many images as there are rows: TRL would take SmolVLM's pixels, a row each, for an image each
    (``trl/trainer/rloo_trainer.py: _get_per_token_logps_and_entropies``).
    """
    with as_built(built("rloo", vision_folder(family))) as made:
        made.generation_config.do_sample = False
        inputs = [made.train_dataset[row] for row in (4, 2, 3, 0) for _ in range(2)]
        expected = made._generate_and_score_completions([dict(each) for each in inputs])
        told = Told()
        attach_guard(made, learned=LearnedLimits(generate_rows=2, score_rows=2), on_incident=told)
        in_parts = made._generate_and_score_completions([dict(each) for each in inputs])
    assert torch.equal(in_parts["completion_ids"], expected["completion_ids"])
    names = {name for name, value in expected.items() if isinstance(value, torch.Tensor)}
    assert any("logps" in name for name in names)
    for name in names:
        torch.testing.assert_close(in_parts[name], expected[name], rtol=1e-4, atol=1e-5)


def batch(tokens: list[int], **images: Any) -> Piece:
    """Rows of 12 with so many image tokens each, a token between every two stretches of four."""
    ids = torch.full((len(tokens), 20), 5)
    for row, number in enumerate(tokens):
        for at in range(number):
            ids[row, at + at // 4] = IMAGE_TOKEN
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images}
    return Piece(inputs=inputs, layout=Layout.ROWS, image_token=IMAGE_TOKEN)


def numbered(*shape: int) -> torch.Tensor:
    """Entries of which each is its own number, counted from 1."""
    return torch.arange(1.0, shape[0] + 1).view(-1, *[1] * (len(shape) - 1)).expand(shape)


GRID = torch.tensor([[1, 4, 4], [1, 2, 8], [1, 4, 8]])
PATCHES = {"pixel_values": numbered(64, 6), "image_grid_thw": GRID}
EACH = {"pixel_values": numbered(3, 3, 8, 8)}


REFUSED = {
    "images are not rows": ([8, 4, 0], {**PATCHES, "image_grid_thw": GRID[:2]}, "do not match"),
    "an image would be of two rows": ([4, 6, 6], PATCHES, "do not match"),
    "TRL counted otherwise": ([8, 0, 8], {**PATCHES, "num_images": [1, 1, 1]}, "do not match"),
    "tokens of less than an image": ([6, 6, 0], EACH, "do not match"),
    "an image without tokens": ([0, 0, 0], EACH, "do not match"),
    "other numbers of tiles": ([8, 4, 0], {"pixel_values": numbered(3, 2, 3, 4, 4)}, "do not match"),
    "a name not known": ([8, 0, 4], {**EACH, "aspect_ratio_ids": torch.ones(3, 1)}, "if a batch has aspect_ratio"),
    "flat pixels": ([8, 0, 4], {"pixel_values": numbered(3, 7)}, "2 dimensions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_certain_is_not_cut(case: str) -> None:
    tokens, images, why = REFUSED[case]
    whole = batch(tokens, **images)
    assert why in str(whole.why_not)
    assert (whole.units, whole.members) == (1, 3)
    if case == "flat pixels":
        whole = replace(whole, image_token=image_token_of(torch.nn.Linear(1, 1)))
        assert "names no image token" in str(whole.why_not)


def test_why_images_cannot_be_told_apart_is_said_when_memory_runs_out(vision_folder: Callable[[str], Path]) -> None:
    with as_built(built("sft", vision_folder("gemma3"))) as made:
        made.data_collator = lambda rows, own=made.data_collator: {**own(rows), "image_aspect": torch.ones(len(rows))}
        made.compute_loss = failing(made.compute_loss, Faults([0, 1]))
        with pytest.raises(torch.OutOfMemoryError, match="to rows if a batch has image_aspect"):
            micro_steps(made)
