"""Rows with images are rehearsed as they are trained on: the same bytes, born in the same order; and windows that are
attended to at once tell what they tell one by one.

``scripts/parity`` compares all three families with every trainer that reads images.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from real_run import Folder, assert_alike, case, rehearsed
from story import story

from autotrain_mem.estimator.memory import LANGUAGE, PROJECTOR, VISION, parts_of
from autotrain_mem.rehearsal import fake_run
from autotrain_mem.rehearsal.rehearse import rehearse
from autotrain_mem.rehearsal.windows import at_once, trial
from autotrain_mem.support.errors import RehearsalError, UnsupportedModelError, UsageError
from autotrain_mem.types import Owner, Trace

IMAGES = ("128x96", "64x80")
"""Of every row: Qwen's windows are whole in the one and not in the other."""


def pictured(method: str, folder: Path, images: tuple[str, ...] = IMAGES, **knobs: Any) -> Any:
    lengths = {"max_length": 120} if method in ("sft", "dpo") else {}
    one = case(method, folder, **lengths, **knobs)
    return replace(one, job=replace(one.job, images=images), tokens=120)


ONE_STEP = {"gradient_accumulation_steps": 1}
KEPT = (Owner.WEIGHTS, Owner.GRADIENTS, Owner.OPTIMIZER_STATE)
CASES = [
    ("sft", "qwen2_5_vl", {"use_peft": True, **ONE_STEP}),
    ("dpo", "gemma3", {"gradient_checkpointing": False, **ONE_STEP}),
    ("grpo", "smolvlm", {}),
    ("sft", "llava", ONE_STEP),
]


@pytest.mark.parametrize(("method", "family", "knobs"), CASES)
def test_a_rehearsal_with_images_is_the_training(
    method: str, family: str, knobs: dict[str, Any], vision_folder: Folder, tmp_path: Path
) -> None:
    fake, _, _ = assert_alike(pictured(method, vision_folder(family), **knobs), tmp_path)
    assert {part for part, _ in parts_of(fake.blocks)} >= {VISION, PROJECTOR, LANGUAGE}


def test_several_processes_with_a_part_that_no_loss_depends_on_are_refused(vision_folder: Folder) -> None:
    """Gemma's tower is made with a head here that nobody asks; with a gradient for all of it two processes do."""
    with pytest.raises(RehearsalError, match="the loss does not depend on them"):
        rehearsed(pictured("sft", vision_folder("gemma3"), processes=2, sharding="ddp"))
    assert rehearsed(pictured("sft", vision_folder("qwen2_5_vl"), processes=2, sharding="ddp", **ONE_STEP)).blocks


def test_larger_images_take_more_unless_they_are_made_smaller(vision_folder: Folder) -> None:
    folder = vision_folder("qwen2_5_vl")
    large = pictured("sft", folder, ("224x168",), **ONE_STEP)
    whole, smaller = (rehearsed(replace(large, knobs=replace(large.knobs, max_pixels=n))) for n in (None, 56 * 56))
    pixels = [
        max(block.size_bytes for block in trace.blocks if "patch_embed" in block.module and block.owner not in KEPT)
        for trace in (whole, smaller)
    ]
    assert pixels[1] < pixels[0] / 4


def test_images_that_leave_no_room_for_a_word_are_refused(vision_folder: Folder) -> None:
    with pytest.raises(UsageError, match="images alone take"):
        rehearsed(pictured("sft", vision_folder("qwen2_5_vl"), ("560x560",)))
    with pytest.raises(UsageError, match="changes nothing"):
        rehearsed(pictured("sft", vision_folder("gemma3"), max_pixels=1000))


def test_a_model_whose_images_are_not_rehearsed_is_named(model_folder: Folder) -> None:
    with pytest.raises(UnsupportedModelError, match="not rehearsed for qwen2 models"):
        rehearsed(pictured("sft", model_folder("qwen2")))


def traced(one: Any, folder: Path, *, whole: bool = False) -> Trace:
    one_by_one = patch.object(fake_run, "windows_at_once", lambda *_: nullcontext()) if whole else nullcontext()
    with one_by_one:
        return rehearse(one.job, one.knobs, one.length, str(folder))


def windowed(folder: Path, **knobs: Any) -> Any:
    """Three windows by three of 56 pixels, of which the lowest are cut."""
    return pictured("sft", folder, ("168x140",), **ONE_STEP, **knobs)


def assert_same(trace: Trace, whole: Trace) -> None:
    assert story(trace) == story(whole)
    assert {*trace.work.work} == {*whole.work.work}
    assert trace.operators == whole.operators


REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"gradient_checkpointing": False, "dtype": "bfloat16"},
        {"arguments": REENTRANT, "use_peft": True},
    ],
)
def test_windows_at_once_are_windows_one_by_one(knobs: dict[str, Any], vision_folder: Folder, tmp_path: Path) -> None:
    one = windowed(vision_folder("qwen2_5_vl"), **knobs)
    scripts: list[at_once.Script] = []
    learn = at_once._Calls._learned

    def learned(*args: Any) -> at_once.Script:
        scripts.append(learn(*args))
        return scripts[-1]

    with patch.object(at_once._Calls, "_learned", learned):
        trace = traced(one, tmp_path)
    assert scripts
    assert_same(trace, traced(one, tmp_path, whole=True))


def test_what_a_trial_does_not_tell_is_run_one_by_one(vision_folder: Folder, tmp_path: Path) -> None:
    one = windowed(vision_folder("qwen2_5_vl"))
    with patch.object(trial.Trial, "story", lambda self: self):
        trace = traced(one, tmp_path)
    assert_same(trace, traced(one, tmp_path, whole=True))
