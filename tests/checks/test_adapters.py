"""Tests the checks of mixtures of experts: what PEFT refuses, and adapters that leave the experts unchanged."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from autotrain_mem.checks import table
from autotrain_mem.checks.model_files import ModelOnCard
from autotrain_mem.checks.preflight_checks import UNFORESEEN, setup_of
from autotrain_mem.trainers.pretrained import load_config
from autotrain_mem.types import Job
from autotrain_mem.types.findings import collect

Folder = Callable[[str], pathlib.Path]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ALL = ["all-linear"]


def said(folder: pathlib.Path, method: str = "sft", **arguments: Any) -> list[tuple[str, str]]:
    job = Job(method=method, model=str(folder), dataset=None, arguments=arguments)
    card = {"compute_capability": (8, 0), "to_train": False, "on_cpu": False, "reads_data": False}
    setup = setup_of(job, load_config(str(folder)), "out", **card)
    return [(one.kind, f"{one.message} {one.cure}") for one in collect(table.PREFLIGHT, setup, UNFORESEEN)]


@pytest.mark.parametrize(
    ("family", "arguments", "kind", "words"),
    [
        ("qwen2", {}, None, ""),
        ("mixtral", {}, "warning", "--lora_target_parameters experts.down_proj experts.gate_up_proj --lora_dropout 0"),
        ("gpt_oss", {"lora_target_modules": ALL}, "warning", "does not adapt the experts"),
        ("gpt_oss", {"lora_target_parameters": EXPERTS}, "error", "--lora_dropout 0.05 cannot be applied"),
        ("gpt_oss", {"lora_target_parameters": EXPERTS, "use_peft": False}, "error", "--lora_dropout 0, or only"),
        ("gpt_oss", {"lora_target_parameters": EXPERTS, "lora_dropout": 0.0}, None, ""),
        ("gpt_oss", {"lora_target_parameters": ["experts.w1", EXPERTS[0]]}, "error", "experts.w1 matches no parameter"),
        ("qwen3_moe", {"lora_target_modules": ALL, "lora_dropout": 0.0}, None, ""),
        ("qwen3_moe", {"lora_target_modules": ["gate_proj", "down_proj"]}, "error", "without also targeting up_proj"),
    ],
)
def test_experts_that_lora_cannot_or_does_not_adapt_are_reported(
    family: str, arguments: dict[str, Any], kind: str | None, words: str, model_folder: Folder
) -> None:
    found = said(model_folder(family), **{"use_peft": True, **arguments})
    assert [each for each, _ in found] == ([] if kind is None else [kind])
    assert all(words in text for _, text in found)


@pytest.mark.parametrize(
    ("arguments", "count"), [({}, 1), ({"router_aux_loss_coef": 0.0}, 0), ({"loss_type": "nll"}, 0)]
)
def test_trls_router_loss_needs_num_experts_in_the_config(
    arguments: dict[str, Any], count: int, tmp_path: pathlib.Path
) -> None:
    config = {"model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"], "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = [text for kind, text in said(tmp_path, **arguments) if kind == "error"]
    assert len([text for text in found if "--router_aux_loss_coef 0" in text]) == count


@pytest.mark.parametrize(
    ("arguments", "count"),
    [({}, 1), ({"gradient_checkpointing": True}, 0), ({"router_aux_loss_coef": 0.0}, 0), ({"lmbda": 0.0}, 0)],
)
def test_the_routers_loss_fails_where_gkd_generates_with_a_cache(
    arguments: dict[str, Any], count: int, model_folder: Folder
) -> None:
    found = said(model_folder("qwen3_moe"), "gkd", **arguments)
    assert [kind for kind, text in found if "GKD generates" in text] == ["error"] * count


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"use_peft": True}, "does not adapt the experts"), ({}, ""), ({"load_in_4bit": True}, "quantized already")],
)
def test_a_checkpoint_in_mxfp4_is_trained_and_not_quantized_again(
    arguments: dict[str, Any], words: str, model_folder: Folder, tmp_path: pathlib.Path
) -> None:
    config = json.loads((model_folder("gpt_oss") / "config.json").read_text())
    packed = {**config, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(packed))
    job = Job(method="sft", model=str(tmp_path), dataset=None, arguments=arguments)
    subject = ModelOnCard(job=job, config=load_config(str(tmp_path)), compute_capability=(8, 0))
    refused = [one.message for one in collect(table.MODEL, subject, UNFORESEEN)]
    texts = refused or [text for _, text in said(tmp_path, **arguments)]
    assert [words in text for text in texts] == ([True] if words else [])
