"""Mixtures of experts are rehearsed as they run, to the byte: whatever computes the experts, and whatever adapts them."""

import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from real_run import assert_alike, births, case, peaks
from tiny import pack_in_mxfp4, tiny_folder

from autotrain_mem.spec import Owner

pytestmark = pytest.mark.slow

Folder = Callable[[str], pathlib.Path]

EXPERTS = {"lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "lora_dropout": 0.0}
WEIGHTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "attention": ({}, {"use_peft": True}),
    "experts": (EXPERTS, {"use_peft": True}),
}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_mixtures_are_rehearsed_to_the_byte(
    family: str, weights: str, model_folder: Folder, tmp_path: pathlib.Path
) -> None:
    """TRL adds the loss of the routers by itself; PEFT's copy of all experts of a layer is among the births."""
    arguments, knobs = WEIGHTS[weights]
    for checkpointing, dtype in itertools.product((True, False), ("float32", "bfloat16")):
        one = case("sft", model_folder(family), arguments, gradient_checkpointing=checkpointing, dtype=dtype, **knobs)
        assert_alike(one, tmp_path, compute_capability=(9, 0))


def test_mxfp4_is_dequantized_as_it_loads(tmp_path: pathlib.Path) -> None:
    folder = pack_in_mxfp4(tiny_folder(tmp_path / "oss", "gpt_oss"))
    fake, real, trainer = assert_alike(case("sft", folder, use_peft=True, dtype="bfloat16"), tmp_path)
    experts, inner, outer = 4, 64, 2 * 192
    weight = 2 * experts * inner * outer
    assert peaks(fake)["load"] == peaks(real)["load"]
    born = [(owner, size) for phase, owner, size, _ in births(fake) if phase == "load"]
    assert born.count((Owner.WEIGHTS.value, weight)) == 2, "gate and up of two layers"
    assert born.count((Owner.OTHER.value, weight)) == 2, "before it is transposed"
    assert trainer.model.get_submodule("base_model.model.model.layers.0.mlp.experts").gate_up_proj.abs().sum() > 0
