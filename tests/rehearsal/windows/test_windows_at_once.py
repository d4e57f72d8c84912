"""Windows that are attended to at once tell what they tell one by one: every birth and death, and all the work."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from real_run import case
from story import story

from autotrain_mem.rehearsal import fake_run
from autotrain_mem.rehearsal.rehearse import rehearse
from autotrain_mem.rehearsal.windows import at_once, trial
from autotrain_mem.types import Trace

IMAGES = ("168x140",)
"""Three windows by three of 56 pixels, of which the lowest are cut."""


def traced(one: Any, folder: Path, *, whole: bool = False) -> Trace:
    one_by_one = patch.object(fake_run, "windows_at_once", lambda *_: nullcontext()) if whole else nullcontext()
    with one_by_one:
        return rehearse(one.job, one.knobs, 120, str(folder))


def pictured(folder: Path, **knobs: Any) -> Any:
    one = case("sft", folder, max_length=120, **knobs)
    return replace(one, job=replace(one.job, images=IMAGES))


def assert_same(trace: Trace, whole: Trace) -> None:
    assert story(trace) == story(whole)
    assert {*trace.work.work} == {*whole.work.work}
    assert trace.operators == whole.operators


REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}


@pytest.mark.parametrize(
    "knobs",
    [
        {"gradient_checkpointing": True, "gradient_accumulation_steps": 1},
        {"gradient_checkpointing": False, "dtype": "bfloat16", "gradient_accumulation_steps": 1},
        {"arguments": REENTRANT, "gradient_checkpointing": True, "use_peft": True},
    ],
)
def test_windows_at_once_are_windows_one_by_one(
    knobs: dict[str, Any], vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    one = pictured(vision_folder("qwen2_5_vl"), **knobs)
    scripts: list[at_once.Script] = []
    learn = at_once._Calls._learned

    def learned(*args: Any) -> at_once.Script:
        scripts.append(learn(*args))
        return scripts[-1]

    with patch.object(at_once._Calls, "_learned", learned):
        trace = traced(one, tmp_path)
    assert scripts
    assert_same(trace, traced(one, tmp_path, whole=True))


def test_what_a_trial_does_not_tell_is_run_one_by_one(vision_folder: Callable[[str], Path], tmp_path: Path) -> None:
    one = pictured(vision_folder("qwen2_5_vl"), gradient_checkpointing=True, gradient_accumulation_steps=1)
    with patch.object(trial.Trial, "story", lambda self: self):
        trace = traced(one, tmp_path)
    assert_same(trace, traced(one, tmp_path, whole=True))
