"""TRL's trainer around a model object, or the name of one, as a script would make it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autotrain_mem.methods.worst_case_text import stub_tokenizer
from autotrain_mem.rehearsal.fake_run import TrainerSpec, Watch, rehearse_trainer
from autotrain_mem.types import Trace

ROWS, LENGTH, STEPS = 2, 48, 2


def sft_trainer(model: Any, output_dir: Path) -> Any:
    """A trainer of two steps."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    small = {"max_steps": STEPS, "per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 2, "bf16": True}
    quiet = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    rows = Dataset.from_list([{"input_ids": [5] * LENGTH} for _ in range(ROWS * STEPS * 2)])
    return SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=str(output_dir), **small, **quiet),
        train_dataset=rows,
        processing_class=stub_tokenizer(),
    )


def with_lora(model: Any, **options: Any) -> Any:
    """The model with an adapter on all its linear layers."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **options))


def rehearsed(build: Callable[[], Any]) -> Trace:
    """What a trainer would allocate, by its rehearsal."""
    return rehearse_trainer(TrainerSpec(build=build))


def trained(build: Callable[[], Any]) -> tuple[Trace, Any]:
    """What it allocates on real tensors, and the trainer."""
    torch.manual_seed(0)
    watch = Watch()
    with watch.cuda_semantics():
        trainer = build()
        watch.train(trainer)
    return watch.recorder.trace(), trainer
