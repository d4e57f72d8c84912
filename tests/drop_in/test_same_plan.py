"""TRL's own scripts, in which only the trainer's class comes from elsewhere, train with the command's plan; and so do
trainers without a script, of PPO's four models and GKD's two, and images."""

import importlib.resources
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import trl
from datasets import Dataset
from PIL import Image
from transformers import AutoTokenizer, BitsAndBytesConfig
from trl.experimental.gkd import GKDConfig, GKDTrainer

import autotrain_mem
from autotrain_mem import AutoFit, api
from autotrain_mem.cli import flags
from autotrain_mem.drop_in.experimental import _Quantizing
from autotrain_mem.support.errors import DatasetFormatError
from autotrain_mem.types import Plan
from autotrain_mem.types.methods_table import METHODS
from autotrain_mem.worker.pool import Workers
from tests.drop_in.conftest import QUIET, SETTLED, config, pairs, ppo_models, prompts, texts

pytestmark = pytest.mark.slow

SETTLED_FLAGS = "--per_device_train_batch_size 4 --gradient_checkpointing false --optim adamw_torch"
PAIRS = f"--max_length 64 {SETTLED_FLAGS}"
LORA = f"{PAIRS} --use_peft --lora_r 4 --lora_target_modules q_proj v_proj"
ONLINE = (
    f"--num_generations 4 --max_completion_length 8 --reward_funcs tests.drop_in.conftest.shortness {SETTLED_FLAGS}"
)


def check_same(plan: Plan, workers: Workers, method: str, *argv: str) -> None:
    request, _ = flags.read(f"autofit {method}", argv)
    other = api.plan(api.rehearsals_for(workers, request, print), to_train=True)
    # A script may hold a reference of its own, so whether to precompute its scores is left alone.
    assert plan.knobs == replace(other.knobs, precompute_ref_log_probs=plan.knobs.precompute_ref_log_probs)
    assert plan.level == other.level
    assert replace(plan.estimate.memory, rehearsal_seconds=0) == replace(other.estimate.memory, rehearsal_seconds=0)
    assert plan.estimate.required_bytes == other.estimate.required_bytes
    if method not in ("dpo", "kto"):  # a command's next level precomputes the reference's scores
        assert [attempt.knobs for attempt in plan.attempts] == [attempt.knobs for attempt in other.attempts]
    assert [lever.name for lever in plan.levers] == [lever.name for lever in other.levers]
    assert plan.data == other.data


def rows_file(folder: Path, rows: Any) -> Path:
    (folder / "data").mkdir()
    path = folder / "data" / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("method", "rows", "words"),
    [
        pytest.param("sft", texts, LORA, marks=pytest.mark.newest),
        ("reward", pairs, PAIRS),
        ("dpo", pairs, PAIRS),
        ("kto", pairs, PAIRS),
        ("grpo", prompts, ONLINE),
    ],
)
def test_a_script_of_trl_trains_with_the_commands_plan(
    workers: Workers,
    qwen: Path,
    tiny_reward_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    rows: Callable[[], Any],
    words: str,
) -> None:
    name, seen, data = METHODS[method].trainer, list[Any](), rows_file(tmp_path, rows()).parent
    kind = getattr(autotrain_mem, name)

    def train(self: Any, _trls: Any = kind.train, **resume: Any) -> Any:
        seen.append(self)
        return _trls(self, **resume)

    monkeypatch.setattr(kind, "train", train)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "path", [*sys.path])  # which the scripts with rewards prepend to
    given = ["--model_name_or_path", str(qwen), "--dataset_name", str(data), "--output_dir", str(tmp_path / "out")]
    given += ["--use_cpu", "--max_steps", "2", "--report_to", "none", *words.split()]
    given += ["--reward_model_name_or_path", str(tiny_reward_model)] if METHODS[method].is_online else []
    monkeypatch.setattr(sys, "argv", [f"{method}.py", *given])
    script = (importlib.resources.files("trl") / "scripts" / f"{method}.py").read_text(encoding="utf-8")
    ours = script.replace(
        f"    from trl import {name}, ", f"    from autotrain_mem import {name}\n    from trl import "
    )
    assert ours != script
    exec(compile(ours, f"{method}.py", "exec"), {"__name__": "__main__"})
    (trainer,) = seen
    assert trainer.state.global_step == 2
    assert any((tmp_path / "out" / f"{kind}.safetensors").is_file() for kind in ("model", "adapter_model"))
    plan, args = trainer.plan, trainer.args
    assert (plan.estimate.hardware.origin, plan.level) == ("cpu", "lossless")
    assert args.per_device_train_batch_size == plan.knobs.per_device_train_batch_size
    assert args.gradient_checkpointing is plan.knobs.gradient_checkpointing
    check_same(plan, workers, method, *given)


def test_a_search_by_the_class_is_the_commands(workers: Workers, qwen: Path, tmp_path: Path) -> None:
    args = config(trl.SFTConfig, tmp_path, max_length=64)
    asked, autofit = args.to_dict(), AutoFit(effective_batch_size=8, gpu="80MiB", show=False)
    trainer = autotrain_mem.SFTTrainer(str(qwen), args=args, train_dataset=texts(), autofit=autofit)
    assert args.to_dict() == asked
    knobs, made = trainer.plan.knobs, trainer.args
    sizes = (made.per_device_train_batch_size, made.gradient_accumulation_steps, made.gradient_checkpointing)
    assert sizes == (knobs.per_device_train_batch_size, knobs.gradient_accumulation_steps, knobs.gradient_checkpointing)
    words = ["--model", str(qwen), "--dataset", str(rows_file(tmp_path, texts())), "--max_length", "64"]
    check_same(trainer.plan, workers, "sft", *words, "--effective_batch_size", "8", "--gpu", "80MiB")


def test_ppo(workers: Workers, qwen: Path, tiny_reward_model: Path, tmp_path: Path) -> None:
    """TRL carries no script for it: one written after its documentation of the trainer."""
    pytest.importorskip("trl.experimental.ppo", reason="TRL 1.13 has no PPO")
    from trl.experimental.ppo import PPOConfig

    tokenizer = AutoTokenizer.from_pretrained(qwen, padding_side="left")
    rows = prompts().map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]}, remove_columns="prompt")
    settings = {"response_length": 8, "num_ppo_epochs": 1, "num_sample_generations": 0, "total_episodes": 8}
    settings["local_rollout_forward_batch_size"] = 4
    args = config(PPOConfig, tmp_path, **settings, **SETTLED)
    trainer = autotrain_mem.PPOTrainer(
        args=args,
        processing_class=tokenizer,
        **ppo_models(qwen, tiny_reward_model),
        train_dataset=rows,
        eval_dataset=rows,
        autofit=AutoFit(gpu="80MiB", show=False),
    )
    words = ["--model", str(qwen), "--dataset", str(rows_file(tmp_path, prompts())), "--gpu", "80MiB"]
    words += ["--reward_model_path", str(tiny_reward_model), "--dtype", "float32", *SETTLED_FLAGS.split()]
    words += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    check_same(trainer.plan, workers, "ppo", *words)
    trainer.train()
    trainer.save_model(args.output_dir)
    assert trainer.state.global_step == 1
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_gkd_takes_student_and_teacher_by_their_names(qwen: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "one two three"}, {"role": "assistant", "content": "four five"}]
    tokenizer = AutoTokenizer.from_pretrained(qwen, padding_side="left")
    data = {"train_dataset": Dataset.from_list([{"messages": turns}] * 8), "processing_class": tokenizer}
    args = config(GKDConfig, tmp_path, max_length=64, max_new_tokens=4, save_strategy="no", **SETTLED)
    trainer = autotrain_mem.GKDTrainer(str(qwen), str(qwen), args=args, autofit=QUIET, **data)
    assert (trainer.plan.method, trainer.plan.knobs.max_new_tokens) == ("gkd", 4)
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_quantization_of_the_plans_reaches_the_student_and_not_the_config_that_was_handed_over() -> None:
    taken: dict[str, Any] = {}

    def construct(trainer: Any, **keywords: Any) -> None:
        taken.update(keywords)

    trls = GKDTrainer.__init__
    args, four_bits = GKDConfig(output_dir="unused", use_cpu=True, bf16=False), BitsAndBytesConfig(load_in_4bit=True)
    with pytest.MonkeyPatch.context() as patched:
        construct.__signature__ = inspect.signature(trls)  # type: ignore[attr-defined]
        patched.setattr(GKDTrainer, "__init__", construct)
        _Quantizing("student", "teacher", args, quantization_config=four_bits)
    assert taken["args"].model_init_kwargs == {"quantization_config": four_bits}
    assert args.model_init_kwargs is None
    assert (taken["model"], taken["teacher_model"]) == ("student", "teacher")


def pictures() -> Dataset:
    said = [{"role": "user", "content": "how many apples"}, {"role": "assistant", "content": "two apples"}]
    return Dataset.from_dict({"messages": [said] * 8, "images": [[Image.new("RGB", (112, 84), n)] for n in range(8)]})


def test_a_script_gives_the_model_by_its_name_and_the_images_are_as_small_as_it_says(
    vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    call: dict[str, Any] = {"args": config(trl.SFTConfig, tmp_path, **SETTLED), "train_dataset": pictures()}
    model, small = str(vision_folder("qwen2_5_vl")), replace(QUIET, max_pixels=56 * 56)
    trainer: Any = autotrain_mem.SFTTrainer(model, **call, autofit=small)
    assert trainer.plan.data.images.most == 2  # of 28 x 28 pixels; of 12, as the image is
    batch = next(iter(trainer.get_train_dataloader()))
    patches = 2 * 4
    assert batch["pixel_values"].shape[0] == patches * batch["input_ids"].shape[0]
    trainer.train()


@pytest.mark.parametrize("name", ["data_collator", "formatting_func"])
def test_what_a_scripts_own_code_makes_of_images_is_refused(name: str, qwen: Path, tmp_path: Path) -> None:
    call: dict[str, Any] = {"args": config(trl.SFTConfig, tmp_path), "train_dataset": pictures(), name: print}
    with pytest.raises(DatasetFormatError, match=f"holds images .images., but .* not with {name}"):
        autotrain_mem.SFTTrainer(str(qwen), **call, autofit=QUIET)
