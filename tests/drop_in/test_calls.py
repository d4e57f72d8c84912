"""What is known of a script's call beside its config, and what a plan adds to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

import autotrain_mem
from autotrain_mem import AutoFit
from autotrain_mem.drop_in.plan import Asked, _digest
from autotrain_mem.rehearsal.python_call.capture import Call
from autotrain_mem.rehearsal.python_call.keywords import with_knobs
from tests.drop_in.conftest import shortness, texts
from tests.drop_in.test_promises import QUIET, Weighted, config, planned


def digest(trainer: type = autotrain_mem.SFTTrainer, **keywords: Any) -> str:
    words = {"model": "NAME", **keywords}
    call = Call(trainer=trainer, args=(), kwargs=words, keywords=words)
    return _digest(Asked(method="sft", config_class=trl.SFTConfig, call=call, autofit=AutoFit(), lost=()))


def lora(**more: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **more})


def test_equal_calls_have_equal_digests_and_others_another() -> None:
    from transformers import BitsAndBytesConfig

    assert digest(peft_config=lora()) == digest(peft_config=lora())
    known = [
        digest(),
        digest(peft_config=lora()),
        digest(peft_config=lora(r=8)),
        digest(quantization_config=BitsAndBytesConfig(load_in_4bit=True)),
        digest(quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
        digest(reward_funcs=[shortness]),
        digest(reward_funcs=[shortness, shortness]),
        digest(reward_funcs="NAME"),
    ]
    assert "" not in known
    assert len(set(known)) == len(known)


def test_code_of_the_users_own_is_never_known() -> None:
    assert digest(compute_loss_func=shortness) == ""
    assert digest(data_collator=shortness) == ""
    assert digest(Weighted) == ""
    assert digest(reward_funcs=[torch.nn.Linear(1, 1)]) == ""


def test_quantization_in_the_loading_arguments_is_the_scripts(tmp_path: Path) -> None:
    from transformers import BitsAndBytesConfig

    quantized = BitsAndBytesConfig(load_in_4bit=True)
    args = config(tmp_path, model_init_kwargs={"quantization_config": quantized})
    keywords = with_knobs({"model": "NAME", "args": args, "peft_config": lora()}, "sft", {"load_in_4bit": True})
    assert keywords.get("quantization_config") is None
    without = {"model": "NAME", "args": config(tmp_path), "peft_config": lora()}
    alone = with_knobs(without, "sft", {"load_in_4bit": True})
    assert alone["quantization_config"].load_in_4bit


@pytest.mark.slow
def test_sizes_that_are_free_divide_the_same_batch(tiny_qwen: Path, tmp_path: Path) -> None:
    free = replace(QUIET, tune=["per_device_train_batch_size", "gradient_accumulation_steps"])
    plan = planned(tiny_qwen, tmp_path, free, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    assert plan.knobs.effective_batch_size == 6


@pytest.mark.slow
def test_what_a_rehearsal_leaves_out_of_a_call_is_told(tiny_qwen: Path, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    trainer = autotrain_mem.SFTTrainer(
        str(tiny_qwen),
        args=config(tmp_path),
        train_dataset=texts(),
        compute_metrics=lambda predictions: {},
        callbacks=[TrainerCallback()],
        autofit=QUIET,
    )
    told = " ".join(trainer.plan.estimate.memory.not_counted)
    assert "compute_metrics" in told
    assert "callbacks" in told


@pytest.mark.slow
def test_an_optimizer_object_is_rehearsed_as_it_is(tiny_qwen: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    def plan_with(make: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(tiny_qwen, dtype="float32")
        trainer = autotrain_mem.SFTTrainer(
            model,
            args=config(tmp_path),
            train_dataset=texts(),
            optimizers=(make(model.parameters()), None),
            autofit=QUIET,
        )
        trainer.train()
        return trainer.plan

    def state_bytes(plan: Any) -> int:
        owners = plan.estimate.memory.owners_at_peak.items()
        return sum(size_bytes for owner, size_bytes in owners if owner.value == "optimizer_state")

    adamw = plan_with(lambda parameters: torch.optim.AdamW(parameters, lr=1e-4))
    plain = plan_with(lambda parameters: torch.optim.SGD(parameters, lr=1e-4))
    assert adamw.estimate.memory.peak_allocated_bytes > plain.estimate.memory.peak_allocated_bytes
    assert state_bytes(plain) == 0
