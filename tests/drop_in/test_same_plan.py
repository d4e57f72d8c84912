"""Planning through a class and through the command is the same planning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autotrain_mem
from autotrain_mem import AutoFit, api
from autotrain_mem.cli import flags
from autotrain_mem.spec import Plan
from autotrain_mem.worker.pool import Workers
from tests.drop_in.conftest import pairs, ppo_models, prompts, shortness, texts

pytestmark = pytest.mark.slow

GPU = "80MiB"


def by_the_command(workers: Workers, method: str, *argv: str) -> Plan:
    wish, _ = flags.read(f"autofit {method}", [*argv, "--effective_batch_size", "8", "--gpu", GPU])
    return api.plan(api.rehearsals_for(workers, wish, print), to_train=True)


def by_the_class(kind: type, **keywords: Any) -> Plan:
    asked = keywords["args"].to_dict()
    trainer = kind(**keywords, autofit=AutoFit(effective_batch_size=8, gpu=GPU, show=False))
    knobs, args = trainer.plan.knobs, trainer.args
    assert args.per_device_train_batch_size == knobs.per_device_train_batch_size
    assert args.gradient_accumulation_steps == knobs.gradient_accumulation_steps
    assert args.gradient_checkpointing is knobs.gradient_checkpointing
    assert keywords["args"].to_dict() == asked
    plan: Plan = trainer.plan
    return plan


def check_equal(one: Plan, other: Plan) -> None:
    assert one.knobs == other.knobs
    assert one.level == other.level
    assert replace(one.estimate.memory, rehearsal_seconds=0) == replace(other.estimate.memory, rehearsal_seconds=0)
    assert one.estimate.required_bytes == other.estimate.required_bytes
    assert [attempt.knobs for attempt in one.attempts] == [attempt.knobs for attempt in other.attempts]
    assert [lever.name for lever in one.levers] == [lever.name for lever in other.levers]
    assert one.data == other.data


def rows_file(rows: Any, folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def config(kind: Any, folder: Path, **more: Any) -> Any:
    return kind(str(folder / "out"), use_cpu=True, report_to="none", max_steps=1, **more)


@pytest.mark.parametrize("adapts", [False, True], ids=["full", "LoRA"])
def test_sft(workers: Workers, tiny_qwen: Path, tmp_path: Path, adapts: bool) -> None:
    from peft import LoraConfig
    from trl import SFTConfig

    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    args = config(SFTConfig, tmp_path, max_length=64)
    plan = by_the_class(
        autotrain_mem.SFTTrainer,
        model=str(tiny_qwen),
        args=args,
        train_dataset=texts(),
        peft_config=lora if adapts else None,
    )
    argv = ["--model", str(tiny_qwen), "--dataset", rows_file(texts(), tmp_path), "--max_length", "64"]
    flagged = ["--use_peft", "--lora_r", "4", "--lora_alpha", "8", "--lora_target_modules", "q_proj", "v_proj"]
    flagged += ["--lora_dropout", "0"]
    check_equal(plan, by_the_command(workers, "sft", *argv, *(flagged if adapts else [])))


def kinds(method: str) -> tuple[Any, Any]:
    """Our trainer and TRL's config."""
    import trl

    name = next(name for name in ("SFT", "Reward", "DPO", "KTO", "GRPO", "RLOO") if name.lower() == method)
    return getattr(autotrain_mem, f"{name}Trainer"), getattr(trl, f"{name}Config")


@pytest.mark.parametrize("method", ["reward", "dpo", "kto"])
def test_methods_that_read_pairs(workers: Workers, tiny_qwen: Path, tmp_path: Path, method: str) -> None:
    kind, config_kind = kinds(method)
    args = config(config_kind, tmp_path, max_length=64)
    plan = by_the_class(kind, model=str(tiny_qwen), args=args, train_dataset=pairs())
    argv = ("--model", str(tiny_qwen), "--dataset", rows_file(pairs(), tmp_path), "--max_length", "64")
    check_equal(plan, by_the_command(workers, method, *argv))


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_grpo_and_rloo(workers: Workers, tiny_qwen: Path, tiny_reward_model: Path, tmp_path: Path, method: str) -> None:
    kind, config_kind = kinds(method)
    plan = by_the_class(
        kind,
        model=str(tiny_qwen),
        reward_funcs=[str(tiny_reward_model), shortness],
        args=config(config_kind, tmp_path, max_completion_length=16, num_generations=4),
        train_dataset=prompts(),
    )
    argv = ["--model", str(tiny_qwen), "--dataset", rows_file(prompts(), tmp_path), "--max_completion_length", "16"]
    rewards = ["--reward_model_name_or_path", str(tiny_reward_model), "--reward_funcs", f"{__name__}.shortness"]
    check_equal(plan, by_the_command(workers, method, *argv, "--num_generations", "4", *rewards))


def test_ppo(workers: Workers, tiny_qwen: Path, tiny_reward_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl.experimental.ppo", reason="TRL 1.13 has no PPO")
    from transformers import AutoTokenizer
    from trl.experimental.ppo import PPOConfig

    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen, padding_side="left")
    rows = prompts().map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]}, remove_columns="prompt")
    args = config(PPOConfig, tmp_path, response_length=16)
    plan = by_the_class(
        autotrain_mem.PPOTrainer,
        args=args,
        processing_class=tokenizer,
        **ppo_models(tiny_qwen, tiny_reward_model),
        train_dataset=rows,
    )
    argv = ["--model", str(tiny_qwen), "--dataset", rows_file(prompts(), tmp_path), "--response_length", "16"]
    argv += ["--reward_model_path", str(tiny_reward_model), "--dtype", "float32"]
    check_equal(plan, by_the_command(workers, "ppo", *argv))
