"""fp16 with a scaler, rehearsed as it runs: in float16, with what is trained in float32."""

import pathlib
from collections.abc import Callable

import pytest
import torch
from real_run import VARIANTS, Case, assert_alike, births, case, rehearsal_of, trained

from autotrain_mem.rehearsal.cuda import rules
from autotrain_mem.types import Phase

Folder = Callable[[str], pathlib.Path]
HALF_BASE = {"full": {}} | {name: {**VARIANTS[name], "dtype": "float16"} for name in ("lora", "4-bit", "8-bit")}


@pytest.mark.slow
@pytest.mark.parametrize("variant", HALF_BASE)
def test_a_rehearsal_allocates_what_the_real_run_allocates(
    variant: str, model_folder: Folder, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the scaler, whose few scalars depend on values: it is off on both sides."""
    monkeypatch.setattr(rules, "detect_fake_mode", lambda: "as if there were one")
    one = case("sft", model_folder("qwen2"), fp16=True, **HALF_BASE[variant])
    assert_alike(one, tmp_path)


@pytest.mark.parametrize(("method", "variant"), [("sft", "4-bit"), ("reward", "lora"), ("reward", "8-bit")])
def test_what_is_trained_is_float32_beside_a_float16_base(
    method: str, variant: str, model_folder: Folder, tmp_path: pathlib.Path
) -> None:
    """TRL makes the adapter of a quantized base bfloat16, which CUDA's scaler refuses; a reward model's head would be
    float16, which every scaler refuses."""
    one = case(method, model_folder("qwen2"), fp16=True, **HALF_BASE[variant])
    _, trainer = trained(one, tmp_path)
    dtypes = {parameter.dtype for parameter in trainer.model.parameters() if parameter.requires_grad}
    assert dtypes == {torch.float32}
    assert trainer.accelerator.scaler.is_enabled()


def forward(one: Case, card: tuple[int, int]) -> list[tuple[str, str, int, str]]:
    found = births(rehearsal_of(one.job, one.knobs, one.length, compute_capability=card))
    return [birth for birth in found if birth[0] == Phase.FORWARD.value]


def test_a_float16_base_is_not_cast_more_often_than_a_bfloat16_one(model_folder: Folder) -> None:
    half = case("sft", model_folder("qwen2"), fp16=True, **HALF_BASE["lora"])
    brain = case("sft", model_folder("qwen2"), use_peft=True, dtype="bfloat16")
    assert forward(half, (8, 0)) == forward(brain, (8, 0))


def test_a_t4_has_a_fused_attention_kernel_for_fp16_and_none_for_bf16(model_folder: Folder) -> None:
    t4 = (7, 5)
    half, brain = (case("sft", model_folder("qwen2"), fp16=on, use_peft=True) for on in (True, False))
    assert sum(birth[2] for birth in forward(half, t4)) < sum(birth[2] for birth in forward(brain, t4))
