"""Token lengths of the whole dataset, after the trainer's own formatting."""

from __future__ import annotations

from collections import Counter
from typing import Any

from autotrain_mem.errors import DatasetFormatError, EmptyDatasetError, ModelNotFoundError
from autotrain_mem.rehearsal import dataset
from autotrain_mem.rehearsal.methods import sft
from autotrain_mem.spec import DataProfile, Job


def profile(job: Job, output_dir: str) -> DataProfile:
    """Let the installed SFTTrainer prepare the data, untruncated, and count tokens.

    The trainer gets a model of a few hundred weights, since preparing looks at the tokenizer alone.

    Raises:
        DatasetError: see :func:`autotrain_mem.rehearsal.dataset.load`.
        ModelNotFoundError: the model comes without a tokenizer.
    """
    prepared = _prepared(job, output_dir)
    lengths = Counter(len(ids) for ids in prepared["input_ids"])
    if not lengths:
        raise EmptyDatasetError(
            f"No row of {dataset.dataset_name(job)} is left after preparation.",
            hint="Every row was dropped as empty or fully masked; look at the chat template and the columns.",
        )
    return DataProfile(rows_by_length=dict(lengths))


def load_tokenizer(model: str, **options: Any) -> Any:
    """The model's tokenizer. Raises ModelNotFoundError when there is none."""
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(model, **options)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise ModelNotFoundError(
            f"{model} comes without a tokenizer that can be loaded.",
            hint="Token lengths are unknown without one. Give --max_length N to plan for N tokens, or a model folder "
            "with its tokenizer files.",
        ) from error


def _prepared(job: Job, output_dir: str) -> Any:
    arguments = {
        **{name: value for name, value in job.arguments.items() if value != "auto"},
        "output_dir": output_dir,
        "max_length": None,
        "packing": False,
        "padding_free": False,
        "use_cpu": True,
        "report_to": "none",
        "eval_strategy": "no",
        "load_best_model_at_end": False,
        "push_to_hub": False,
    }
    filled = sft.configs({**arguments, "use_peft": False})
    splits = dataset.load(job, filled)
    tokenizer = load_tokenizer(job.model, trust_remote_code=filled.training.trust_remote_code)
    filled.model.load_in_4bit = filled.model.load_in_8bit = False
    try:
        trainer = sft.build_trainer(
            filled, _smallest_model(), splits[filled.script.dataset_train_split], processing_class=tokenizer
        )
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DatasetFormatError(
            f"TRL cannot prepare {dataset.dataset_name(job)}: {type(error).__name__}: {error}",
            hint="See TRL's dataset formats for SFT; conversational data need a tokenizer with a chat template "
            "(--chat_template_path gives one).",
        ) from error
    return trainer.train_dataset


def _smallest_model() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
