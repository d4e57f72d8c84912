"""bf16 from compute capability 8.0 on, fp16 with a scaler before it, and the user's word above both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from nouns import TRL_DEFAULTS as TRL

from autotrain_mem.planner.precision import can_scale, half_of, lacks_bf16, precise_for, why_fp16

T4, V100, A100 = (7, 5), (7, 0), (8, 0)


@pytest.mark.parametrize(
    ("card", "words", "fp16"),
    [
        *((T4, {"use_peft": True}, True), (V100, {}, True), (A100, {}, False)),
        *((T4, {"bf16": True}, False), (T4, {"bf16": False}, False), (T4, {"fp16": False}, False)),
    ],
)
def test_a_card_before_ampere_trains_in_fp16_unless_the_user_chose(
    card: tuple[int, int], words: dict[str, Any], fp16: bool
) -> None:
    assert precise_for(TRL, words, card) == replace(TRL, fp16=fp16)
    assert lacks_bf16(card) is (card != A100)


@pytest.mark.parametrize(
    ("fp16", "use_peft", "dtype", "scales"),
    [
        (False, False, "bfloat16", True),
        (True, False, "float32", True),
        (True, False, "float16", False),
        (True, False, "bfloat16", False),
        (True, True, "float16", True),
    ],
)
def test_the_scaler_takes_no_gradients_in_half_precision(fp16: bool, use_peft: bool, dtype: str, scales: bool) -> None:
    assert can_scale(replace(TRL, fp16=fp16, use_peft=use_peft, dtype=dtype)) is scales


def test_half_precision_is_that_of_the_products_and_the_reason_names_the_card() -> None:
    assert (half_of(TRL), half_of(replace(TRL, fp16=True))) == ("bfloat16", "float16")
    assert "7.5" in why_fp16(T4)
