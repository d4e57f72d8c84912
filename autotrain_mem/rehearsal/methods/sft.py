"""Supervised fine-tuning: how TRL's SFTTrainer is built, for a rehearsal and for real, and its worst batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotrain_mem.spec import Job, Knobs

REHEARSED_ACCUMULATION = 2
"""Micro-steps per optimizer step in a rehearsal: the second is the first to meet gradients, a third meets no more."""

REHEARSED_STEPS = 2
"""Optimizer steps in a rehearsal: the second is the first to meet the optimizer's state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Configs:
    """TRL's four dataclasses of ``trl sft``, filled."""

    script: Any
    training: Any
    model: Any
    dataset: Any


def make_parser() -> Any:
    """TRL's own parser of ``trl sft``: every flag and YAML key that it takes, we take."""
    from trl.scripts.sft import make_parser as make_trl_parser

    return make_trl_parser(prog="autofit sft")


def configs(arguments: Mapping[str, Any]) -> Configs:
    """TRL's dataclasses out of a flat mapping of their fields; a name that none of them has is left out."""
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

    def fill(kind: Any) -> Any:
        names = {field.name for field in dataclasses.fields(kind) if field.init}
        return kind(**{name: value for name, value in arguments.items() if name in names})

    return Configs(
        script=fill(ScriptArguments),
        training=fill(SFTConfig),
        model=fill(ModelConfig),
        dataset=fill(DatasetMixtureConfig),
    )


def build_trainer(filled: Configs, model: Any, train_dataset: Any, **more: Any) -> Any:
    """The installed SFTTrainer, built as ``trl sft`` builds it. ``model`` is a path, or an object in a rehearsal."""
    from trl import SFTTrainer, get_peft_config

    return SFTTrainer(
        model=model,
        args=filled.training,
        train_dataset=train_dataset,
        peft_config=get_peft_config(filled.model),
        **more,
    )


def build_real_trainer(filled: Configs, model: str, splits: Any) -> Any:
    """The trainer of a real run: the model loaded by TRL from its path, quantized and evaluated as asked."""
    from trl import get_quantization_config

    filled.training.model_init_kwargs = {
        **(filled.training.model_init_kwargs or {}),
        "revision": filled.model.model_revision,
        "attn_implementation": filled.model.attn_implementation,
        "dtype": filled.model.dtype,
    }
    evaluated = filled.training.eval_strategy != "no"
    return build_trainer(
        filled,
        model,
        splits[filled.script.dataset_train_split],
        eval_dataset=splits[filled.script.dataset_test_split] if evaluated else None,
        quantization_config=get_quantization_config(filled.model),
    )


def rehearsal_arguments(job: Job, knobs: Knobs, output_dir: str) -> dict[str, Any]:
    """The job's arguments with the knobs in, and with everything that only a real run needs taken out."""
    accumulation = min(REHEARSED_ACCUMULATION, knobs.gradient_accumulation_steps)
    return {
        **{name: value for name, value in job.arguments.items() if name not in _ONLY_FOR_REAL},
        **knobs.to_json(),
        "gradient_accumulation_steps": accumulation,
        "output_dir": output_dir,
        "max_steps": REHEARSED_STEPS,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "eval_strategy": "no",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
    }


_ONLY_FOR_REAL = frozenset(
    {
        "push_to_hub",
        "load_best_model_at_end",
        "resume_from_checkpoint",
        "num_train_epochs",
        "dataloader_prefetch_factor",
        "dataloader_persistent_workers",
        "eos_token",
        "pad_token",
        "chat_template_path",
        "dataset_text_field",
        "assistant_only_loss",
        "completion_only_loss",
        "dataset_num_proc",
        "dataset_kwargs",
        "torch_compile",
        "hub_model_id",
        "run_name",
    }
)
"""Arguments that say where data come from or where results go: they do not move the peak of a training step."""


def worst_rows(knobs: Knobs, length: int) -> Any:
    """A dataset of rows that fill ``length`` tokens, enough for every micro-step of a rehearsal.

    Packed blocks are full whatever the rows; each gets two documents, since the mask that keeps documents apart is part
    of what a packed batch costs.
    """
    from datasets import Dataset

    rows = knobs.per_device_train_batch_size * REHEARSED_ACCUMULATION * REHEARSED_STEPS
    half = length // 2
    lengths = [length] * rows if not knobs.packing or half == 0 else [length - half, half] * rows
    return Dataset.from_dict({"input_ids": [[5] * tokens for tokens in lengths]})


def pad_last_row(rows: list[Any]) -> list[Any]:
    """Cut one token off the last row: a batch of several rows is padded, and so carries a real attention mask.

    Its shape stays that of the worst batch. A batch of one row has no padding.
    """
    if len(rows) < 2:
        return rows
    *full, last = rows
    return [*full, {name: value[:-1] if isinstance(value, list) else value for name, value in last.items()}]


def stub_tokenizer() -> Any:
    """A tokenizer that a rehearsal never uses on text; the trainer only asks it for special tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(8)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t2")


def rehearse(job: Job, knobs: Knobs, config: Any, length: int, output_dir: str) -> Any:
    """Rehearse one configuration; returns its Trace.

    Args:
        config: The model's transformers config.
        length: Tokens that every row of the worst batch fills.
        output_dir: A scratch folder; nothing of worth is written there.
    """
    from autotrain_mem.rehearsal.materialize import build_on_meta, materialize
    from autotrain_mem.rehearsal.stage import rehearse as rehearse_trainer
    from autotrain_mem.rehearsal.unrehearsed import not_counted

    filled = configs(rehearsal_arguments(job, knobs, output_dir))
    model = build_on_meta(config, dtype=knobs.dtype, attn_implementation=filled.model.attn_implementation)
    rows, tokenizer = worst_rows(knobs, length), stub_tokenizer()

    def build() -> Any:
        return build_trainer(filled, materialize(model), rows, processing_class=tokenizer)

    edit = list if knobs.packing or getattr(filled.training, "padding_free", False) else pad_last_row
    return rehearse_trainer(build, edit, not_counted(job.arguments))
