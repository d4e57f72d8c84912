"""Adapters that PEFT's own configs ask for: rehearsed to the byte, or refused with the reason."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from real_run import assert_alike, case, peaks, rehearsed

from autotrain_mem.settings.adapter_config import canonical
from autotrain_mem.types import Phase

pytestmark = pytest.mark.slow

Folder = Callable[[str], pathlib.Path]

LAYERS = ["q_proj", "v_proj", "down_proj"]
LORA = {"peft_type": "LORA", "r": 8, "target_modules": LAYERS}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DoRA": ({**LORA, "use_dora": True}, {}),
    "DoRA on 4 bits": ({**LORA, "use_dora": True}, {"load_in_4bit": True, "gradient_checkpointing": False}),
    "PiSSA": ({**LORA, "init_lora_weights": "pissa"}, {"gradient_checkpointing": False}),
    "AdaLoRA": ({"peft_type": "ADALORA", "target_modules": LAYERS, "total_step": 9, "tinit": 1, "tfinal": 1}, {}),
    "IA3": ({"peft_type": "IA3", "target_modules": LAYERS, "feedforward_modules": ["down_proj"]}, {}),
    "VeRA": ({"peft_type": "VERA", "r": 8, "target_modules": ["q_proj", "o_proj"]}, {"gradient_checkpointing": False}),
    "LoKr": ({"peft_type": "LOKR", "r": 8, "target_modules": LAYERS}, {}),
    "OFT on 4 bits": ({"peft_type": "OFT", "oft_block_size": 16, "target_modules": LAYERS}, {"load_in_4bit": True}),
    "BOFT": ({"peft_type": "BOFT", "boft_block_size": 4, "target_modules": ["q_proj"]}, {}),
    "prompt tuning": ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 7}, {}),
    "prefix tuning": ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 7}, {"gradient_checkpointing": False}),
}
"""Kind -> its config, and what else is chosen."""


def adapted(folder: pathlib.Path | str, content: dict[str, Any], **knobs: Any) -> Any:
    return case("sft", folder, use_peft=True, peft_config=canonical(content), **knobs)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_rehearsed_to_the_byte(kind: str, model_folder: Folder, tmp_path: pathlib.Path) -> None:
    content, knobs = KINDS[kind]
    _, _, trainer = assert_alike(adapted(model_folder("llama"), content, **knobs), tmp_path)
    assert trainer.model.peft_config["default"].peft_type.value == content["peft_type"]


def test_prompts_make_rows_longer_and_dora_keeps_more_than_lora(model_folder: Folder) -> None:
    folder = model_folder("llama")
    lora, dora = (
        peaks(rehearsed(adapted(folder, {**LORA, "use_dora": on}, gradient_checkpointing=False)))
        for on in (False, True)
    )
    assert dora["backward"] > lora["backward"]
    few, many = (
        peaks(rehearsed(adapted(folder, {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": number})))
        for number in (4, 40)
    )
    assert many["forward"] > 1.1 * few["forward"]


def test_what_pissa_decomposes_is_in_the_peak_of_loading(model_folder: Folder) -> None:
    folder = model_folder("llama")
    plain, pissa = (
        rehearsed(adapted(folder, {**LORA, "init_lora_weights": start}, dtype="bfloat16")) for start in (True, "pissa")
    )
    largest_in_float32 = 192 * 64 * 4
    assert peaks(pissa)[Phase.LOAD] > peaks(plain)[Phase.LOAD] + 2 * largest_in_float32
    assert peaks(pissa)[Phase.BACKWARD] == peaks(plain)[Phase.BACKWARD]
    assert any("cuSOLVER" in fact for fact in pissa.not_counted)


def test_the_config_is_the_knob_as_json() -> None:
    assert json.loads(adapted("m", LORA).knobs.peft_config) == LORA
