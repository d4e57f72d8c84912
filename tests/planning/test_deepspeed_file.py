"""A user's own config of DeepSpeed goes into a wish: by path, or as its text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotrain_mem.planning.accelerate_config import with_accelerate
from autotrain_mem.planning.wish import Wish
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types.autofit import AutoFit

CONFIG = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}


@pytest.mark.parametrize("is_file", [True, False])
def test_what_it_says_is_said_by_flags(is_file: bool, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    given = str(tmp_path / "ds.json") if is_file else json.dumps(CONFIG)
    wish = with_accelerate(Wish(method="sft", model="m", argv=("--deepspeed", given, "--max_length", "64")))
    assert wish.argv == ("--max_length", "64")
    assert (wish.autofit.sharding, wish.autofit.offload_param_device) == ("zero3", "cpu")
    assert wish.config["per_device_train_batch_size"] == 4
    assert wish.config["deepspeed"]["train_micro_batch_size_per_gpu"] == "auto"
    assert with_accelerate(wish) == wish


def test_a_flag_that_says_otherwise_contradicts_it() -> None:
    wish = Wish(method="sft", model="m", argv=("--deepspeed", json.dumps(CONFIG)), autofit=AutoFit(sharding="zero2"))
    with pytest.raises(UsageError, match="--sharding zero2 and the zero3 of --deepspeed contradict"):
        with_accelerate(wish)


ALONE = {"distributed_type": "DEEPSPEED", "num_processes": 1, "deepspeed_config": {"zero_stage": 3}}


def launched(deepspeed: dict[str, object], **given: object) -> Wish:
    content = {"distributed_type": "DEEPSPEED", "num_processes": 4, "mixed_precision": "bf16"}
    autofit = AutoFit(accelerate_config={**content, "deepspeed_config": deepspeed}, **given)  # type: ignore[arg-type]
    return with_accelerate(Wish(method="sft", model="m", autofit=autofit))


def test_a_config_of_accelerates_says_it_by_flags_too(tmp_path: Path) -> None:
    wish = launched({"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "none"})
    assert (wish.autofit.gpus, wish.autofit.sharding) == (4, "zero3")
    assert (wish.autofit.offload_optimizer_device, wish.autofit.offload_param_device) == ("cpu", None)
    assert (wish.accelerate, wish.autofit.accelerate_config, wish.config) == (None, None, {"bf16": True})
    assert with_accelerate(wish) == wish
    assert launched({"gradient_accumulation_steps": 4}).config["gradient_accumulation_steps"] == 4
    assert launched({"gradient_accumulation_steps": "auto"}).autofit.sharding == "zero2"
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    wish = launched({"deepspeed_config_file": str(tmp_path / "ds.json")}, sharding="zero3")
    assert (wish.autofit.gpus, wish.autofit.sharding, wish.autofit.offload_param_device) == (4, "zero3", "cpu")
    alone = with_accelerate(Wish(method="sft", model="m", autofit=AutoFit(accelerate_config=ALONE)))
    assert (alone.autofit.gpus, alone.autofit.sharding) == (1, "zero3")
    with pytest.raises(UsageError, match="--sharding zero2"):
        launched({"zero_stage": 3}, sharding="zero2")
