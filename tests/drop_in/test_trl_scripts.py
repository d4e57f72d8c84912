"""The scripts that the installed TRL carries run with nothing changed but where the trainer's class comes from."""

from __future__ import annotations

import importlib.resources
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

import autotrain_mem
from autotrain_mem.spec import Plan
from tests.drop_in.conftest import pairs, ppo_models, prompts, texts

pytestmark = pytest.mark.slow

SHORTNESS = "tests.drop_in.conftest.shortness"
STEPS = 2
SETTLED = ("--gradient_checkpointing", "false", "--optim", "adamw_torch")
"""Given where it is not the plan that is looked at: two rehearsals fewer."""


def script_of(name: str, trainer: str) -> str:
    """TRL's script, in which one name is imported from another package."""
    asked = f"    from trl import {trainer}, "
    text = (importlib.resources.files("trl") / "scripts" / f"{name}.py").read_text(encoding="utf-8")
    assert text.count(asked) == 1
    return text.replace(asked, f"    from autotrain_mem import {trainer}\n    from trl import ")


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The trainers that a script trains, which it keeps to itself."""
    seen: list[Any] = []
    for name in ("SFTTrainer", "RewardTrainer", "DPOTrainer", "GRPOTrainer", "RLOOTrainer"):
        kind = getattr(autotrain_mem, name)

        def train(self: Any, *args: Any, _trls: Any = kind.train, **kwargs: Any) -> Any:
            seen.append(self)
            return _trls(self, *args, **kwargs)

        monkeypatch.setattr(kind, "train", train)
    return seen


def run_script(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, trainer: str, model: Path, rows: Any, *argv: str
) -> None:
    """``python -m trl.scripts.NAME ...``, for two steps on the CPU, with rows in a file."""
    data = folder / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    monkeypatch.setattr(sys, "path", [*sys.path])  # which the scripts with rewards prepend to
    given = ["--model_name_or_path", str(model), "--dataset_name", str(data), "--output_dir", str(folder / "out")]
    given += ["--use_cpu", "--max_steps", str(STEPS), "--report_to", "none", "--per_device_train_batch_size", "4"]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *given, *argv])
    exec(compile(script_of(name, trainer), f"{name}.py", "exec"), {"__name__": "__main__"})


def check(trainers: list[Any], folder: Path, printed: str) -> Plan:
    """It trained as it was told to, with a plan, and saved what it trained."""
    (trainer,) = trainers
    assert trainer.state.global_step == STEPS
    assert (folder / "out" / "model.safetensors").is_file() or (folder / "out" / "adapter_model.safetensors").is_file()
    assert "Training completed." in printed
    assert f"Model saved to {folder / 'out'}." in printed
    plan: Plan = trainer.plan
    assert plan.estimate.hardware.origin == "cpu"
    assert plan.knobs.per_device_train_batch_size == trainer.args.per_device_train_batch_size == 4
    assert plan.level == "lossless"
    assert plan.data is not None
    return plan


LORA = ("--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj", "--max_length", "64")
COMPLETIONS = ("--num_generations", "4", "--max_completion_length", "8", "--reward_funcs", SHORTNESS, *SETTLED)
PAIRS = ("--max_length", "64", *SETTLED)


@pytest.mark.parametrize(
    ("trainer", "rows", "argv", "knobs"),
    [
        pytest.param("SFTTrainer", texts, LORA, {"use_peft": True, "max_length": 64}, marks=pytest.mark.newest),
        ("RewardTrainer", pairs, PAIRS, {"use_peft": False}),
        ("DPOTrainer", pairs, PAIRS, {"use_peft": False}),
        pytest.param("GRPOTrainer", prompts, COMPLETIONS, {"max_completion_length": 8}, marks=pytest.mark.newest),
        ("RLOOTrainer", prompts, COMPLETIONS, {"num_generations": 4}),
    ],
)
def test_a_script_of_trl_trains_with_a_plan(
    trainers: list[Any],
    tiny_qwen: Path,
    tiny_reward_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trainer: str,
    rows: Callable[[], Any],
    argv: tuple[str, ...],
    knobs: dict[str, Any],
) -> None:
    rewards = ("--reward_model_name_or_path", str(tiny_reward_model)) if "--reward_funcs" in argv else ()
    name = trainer.removesuffix("Trainer").lower()
    run_script(monkeypatch, tmp_path, name, trainer, tiny_qwen, rows(), *argv, *rewards)
    plan = check(trainers, tmp_path, capsys.readouterr().out)
    assert {each: getattr(plan.knobs, each) for each in knobs} == knobs
    assert plan.knobs.gradient_checkpointing is trainers[0].args.gradient_checkpointing is False  # TRL's is True


def test_ppo(tiny_qwen: Path, tiny_reward_model: Path, tmp_path: Path) -> None:
    """TRL carries no script for it: one written after its documentation of the trainer."""
    pytest.importorskip("trl.experimental.ppo", reason="TRL 1.13 has no PPO")
    from transformers import AutoTokenizer
    from trl.experimental.ppo import PPOConfig

    from autotrain_mem import PPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen, padding_side="left")
    rows = prompts().map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]}, remove_columns="prompt")
    args = PPOConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=4,
        total_episodes=STEPS * 4,
        num_ppo_epochs=1,
        response_length=8,
        num_sample_generations=0,
        gradient_checkpointing=False,
        optim="adamw_torch",
    )
    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer,
        **ppo_models(tiny_qwen, tiny_reward_model),
        train_dataset=rows,
        eval_dataset=rows,
    )
    trainer.train()
    trainer.save_model(args.output_dir)
    assert trainer.state.global_step == STEPS
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert trainer.plan.estimate.hardware.origin == "cpu"
    assert trainer.plan.knobs.response_length == 8
