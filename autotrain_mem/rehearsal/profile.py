"""Token lengths of the whole dataset, after the trainer's own formatting."""

from __future__ import annotations

import pathlib
from collections import Counter
from typing import Any

from autotrain_mem.errors import DatasetFormatError, EmptyDatasetError, ModelNotFoundError
from autotrain_mem.rehearsal import dataset
from autotrain_mem.rehearsal.methods import sft
from autotrain_mem.rehearsal.rows import check_rows
from autotrain_mem.spec import DataProfile, Job

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json", "processor_config.json"),
)


def profile(job: Job, output_dir: str) -> DataProfile:
    """Let the installed SFTTrainer prepare the data, untruncated, and count tokens.

    The trainer gets a model of a few hundred weights, since preparing looks at the tokenizer alone.

    Raises:
        DatasetError: see :func:`autotrain_mem.rehearsal.dataset.load`.
        ModelNotFoundError: the model comes without a tokenizer.
    """
    prepared = _prepared(job, output_dir)
    lengths = Counter(len(ids) for ids in prepared["input_ids"])
    if max(lengths, default=0) < 2:
        raise EmptyDatasetError(
            f"No row of {dataset.dataset_name(job)} has two tokens or more, so that there is nothing to predict.",
            hint="Every row is empty, or was dropped as fully masked; look at the chat template and the columns.",
        )
    return DataProfile(rows_by_length=dict(lengths))


def load_tokenizer(model: str, **options: Any) -> Any:
    """The model's tokenizer. Raises ModelNotFoundError when there is none."""
    from transformers import AutoProcessor

    if _lacks_tokenizer(pathlib.Path(model)):
        raise _no_tokenizer(model)
    try:
        return AutoProcessor.from_pretrained(model, **options)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise _no_tokenizer(model) from error


def _lacks_tokenizer(folder: pathlib.Path) -> bool:
    """transformers 5 would make up a tokenizer with an empty vocabulary, whose lengths are wrong."""
    return folder.is_dir() and not any(path.name in _TOKENIZER_FILES for path in folder.iterdir())


def _no_tokenizer(model: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"{model} comes without a tokenizer that can be loaded.",
        hint="Token lengths are unknown without one. Give --max_length N to plan for N tokens, or a model folder with "
        "its tokenizer files.",
    )


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
    split = dataset.load(job, filled)[filled.script.dataset_train_split]
    check_rows(split, filled.training.dataset_text_field, dataset.dataset_name(job))
    tokenizer = load_tokenizer(job.model, trust_remote_code=filled.training.trust_remote_code)
    filled.model.load_in_4bit = filled.model.load_in_8bit = False
    try:
        trainer = sft.build_trainer(filled, _smallest_model(), split, processing_class=tokenizer)
    # TRL, the chat template and the tokenizer work on the user's data here, and raise anything.
    except Exception as error:
        raise _unprepared(job, error, tokenizer) from error
    return trainer.train_dataset


def _unprepared(job: Job, error: Exception, tokenizer: Any) -> DatasetFormatError:
    name = dataset.dataset_name(job)
    if getattr(tokenizer, "chat_template", None) is None and "chat_template" in str(error):
        return DatasetFormatError(
            f"{name} holds conversations, and the tokenizer of {job.model} has no chat template.",
            hint="Give --chat_template_path FILE, a model tuned for chat, or data with prompt and completion as text.",
        )
    return DatasetFormatError(
        f"TRL cannot prepare {name}: {type(error).__name__}: {error}",
        hint="The columns are there, so look at the values, or at the chat template. --debug shows where TRL stopped.",
    )


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
