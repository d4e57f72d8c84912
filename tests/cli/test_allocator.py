"""What a command makes of the allocator's two modes: by itself, by flag, and as the environment sets them."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

import pytest

from autotrain_mem.spec.hardware import HEADROOM_FRACTION
from autotrain_mem.units import MIB
from tests.place import Autofit

PINNED = "--model tiny --max_length 512 --per_device_train_batch_size 4 --gradient_checkpointing true"
ONE_RUNG = f"{PINNED} --fit lossless --forbid activation_offloading,optimizer_offload"
"""Pins that leave a search nothing to choose but the segments."""


@pytest.fixture
def card(autofit: Autofit) -> str:
    """The smallest card that this job fits in expandable segments: too small for segments of fixed size."""
    modes = json.loads(autofit(*shlex.split(f"estimate sft {PINNED} --gpu 300MiB --json")).out)["reserved"]
    fixed, expanded = (modes[name]["peak_reserved_bytes"] for name in ("native", "expandable_segments"))
    size = math.ceil(expanded / (1 - HEADROOM_FRACTION) / MIB)
    assert expanded <= size * MIB * (1 - HEADROOM_FRACTION) < fixed
    return f"{size}MiB"


def planned(autofit: Autofit, card: str, more: str = "") -> dict[str, Any]:
    ran = autofit(*shlex.split(f"plan sft {ONE_RUNG} --gpu {card} --json {more}"))
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_a_plan_that_fits_only_with_expandable_segments_turns_them_on_and_says_why(autofit: Autofit, card: str) -> None:
    found = planned(autofit, card)
    (lever,) = [lever for lever in found["levers"] if lever["name"] == "expandable_segments"]
    assert (lever["before"], lever["after"], lever["harm"]) == (False, True, 0)
    assert lever["why"].startswith("with segments of fixed size it needs")
    estimate = found["estimate"]
    assert estimate["fits"]
    assert estimate["reserved"]["native"]["peak_reserved_bytes"] > estimate["budget_bytes"]
    assert estimate["peak_reserved_bytes"] == estimate["reserved"]["expandable_segments"]["peak_reserved_bytes"]
    fixed = autofit(*shlex.split(f"estimate sft {PINNED} --gpu {card}"))
    assert fixed.out.startswith("does not fit")
    assert "expandable segments would need" in fixed.out


def test_segments_that_the_user_fixed_stay_fixed_and_what_they_expanded_is_no_change(
    autofit: Autofit, card: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"plan sft {ONE_RUNG} --gpu {card}"
    for more in (
        "--forbid activation_offloading,optimizer_offload,expandable_segments",
        "--config fixed_segments.yaml",
    ):
        assert autofit(*shlex.split(f"{line} {more}")).code == 41
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    ran = autofit(*shlex.split(line))
    assert (ran.code, ran.out) == (41, "")
    by_flag = planned(autofit, card, "--expandable_segments")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    by_shell = planned(autofit, card)
    assert by_flag["levers"] == by_shell["levers"] == []
    assert by_flag["knobs"] == by_shell["knobs"]
    assert by_flag["knobs"]["expandable_segments"]


def test_other_settings_of_the_shell_are_counted_too(autofit: Autofit, monkeypatch: pytest.MonkeyPatch) -> None:
    line = shlex.split(f"estimate sft {PINNED} --gpu 300MiB --json")
    before = json.loads(autofit(*line).out)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "large_segment_size_mb:64")
    after = json.loads(autofit(*line).out)
    assert after["peak_allocated_bytes"] == before["peak_allocated_bytes"]
    assert after["peak_reserved_bytes"] > before["peak_reserved_bytes"]
