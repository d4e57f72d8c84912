"""The drop-in GKDTrainer takes student and teacher by their names, and quantizes the student where a plan says so."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import autotrain_mem
from autotrain_mem import AutoFit
from tests.drop_in.conftest import QUIET, config

pytestmark = pytest.mark.slow

TURNS = [{"role": "user", "content": "one two three"}, {"role": "assistant", "content": "four five"}]


def planned(model: Path, folder: Path, autofit: AutoFit = QUIET, **settings: Any) -> Any:
    from transformers import AutoTokenizer
    from trl.experimental.gkd import GKDConfig

    args = config(GKDConfig, folder, **{"max_steps": 1, "max_new_tokens": 4, "save_strategy": "no"} | settings)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    rows = Dataset.from_list([{"messages": TURNS}] * 8)
    kind = autotrain_mem.GKDTrainer
    data = {"train_dataset": rows, "processing_class": tokenizer}
    return kind(str(model), str(model), args=args, autofit=autofit, **data)


def test_it_trains_with_the_plans_settings(tiny_qwen: Path, tmp_path: Path) -> None:
    trainer = planned(tiny_qwen, tmp_path, max_length=64)
    assert (trainer.plan.method, trainer.plan.knobs.max_new_tokens) == ("gkd", 4)
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_quantization_of_the_plans_reaches_the_student_and_not_the_config_that_was_handed_over() -> None:
    from transformers import BitsAndBytesConfig
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    from autotrain_mem.drop_in.experimental import _Quantizing

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
