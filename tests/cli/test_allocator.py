"""What a command makes of the allocator's two modes: by itself, by flag, and as the environment sets them."""

import json
import math
import shlex

import pytest

from autotrain_mem.support.units import MIB
from autotrain_mem.types.hardware import HEADROOM_FRACTION
from tests.place import Autofit

PINNED = "--model tiny --max_length 512 --per_device_train_batch_size 4 --gradient_checkpointing true"
ONE_RUNG = f"{PINNED} --fit lossless --forbid activation_offloading,optimizer_offload"
"""Pins that leave a search nothing to choose but the segments."""


def test_segments_are_expandable_where_only_that_fits_unless_the_user_fixed_them(
    autofit: Autofit, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = json.loads(autofit(*shlex.split(f"estimate sft {PINNED} --gpu 300MiB --json")).out)["reserved"]
    fixed_bytes, expanded_bytes = (modes[name]["peak_reserved_bytes"] for name in ("native", "expandable_segments"))
    size = math.ceil(expanded_bytes / (1 - HEADROOM_FRACTION) / MIB)
    assert expanded_bytes <= size * MIB * (1 - HEADROOM_FRACTION) < fixed_bytes, "too small for segments of fixed size"
    plan = f"plan sft {ONE_RUNG} --gpu {size}MiB --json"
    found = json.loads(autofit(*shlex.split(plan)).out)
    (lever,) = [lever for lever in found["levers"] if lever["name"] == "expandable_segments"]
    assert (lever["before"], lever["after"], lever["harm"]) == (False, True, 0)
    assert lever["why"].startswith("with segments of fixed size it needs")
    estimate = found["estimate"]
    assert estimate["fits"]
    assert estimate["peak_reserved_bytes"] == expanded_bytes
    fixed = autofit(*shlex.split(f"estimate sft {PINNED} --gpu {size}MiB"))
    assert fixed.out.startswith("does not fit")
    assert "expandable segments would need" in fixed.out
    assert autofit(*shlex.split(f"{plan} --config fixed_segments.yaml")).code == 41
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    ran = autofit(*shlex.split(plan))
    assert (ran.code, ran.out) == (41, "")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    by_shell = json.loads(autofit(*shlex.split(plan)).out)
    assert (by_shell["levers"], by_shell["knobs"]["expandable_segments"]) == ([], True), "which is no change"


def test_other_settings_of_the_shell_are_counted_too(autofit: Autofit, monkeypatch: pytest.MonkeyPatch) -> None:
    line = shlex.split(f"estimate sft {PINNED} --gpu 300MiB --json")
    before = json.loads(autofit(*line).out)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "large_segment_size_mb:64")
    after = json.loads(autofit(*line).out)
    assert after["peak_allocated_bytes"] == before["peak_allocated_bytes"]
    assert after["peak_reserved_bytes"] > before["peak_reserved_bytes"]
