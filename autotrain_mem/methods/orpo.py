"""Adapts odds ratio preference optimization with the ORPOTrainer of ``trl.experimental``.

TRL has no script for it or for CPO (``cpo``). Both are built as TRL's scripts build other trainers.
"""

import importlib
import sys
from functools import partial
from typing import Any

from autotrain_mem.methods.configs import Configs, arguments_of_loaded, own_tokenizer, padding
from autotrain_mem.methods.row_lengths import RowLengths, count_prepared
from autotrain_mem.methods.worst_case_text import EditRows, repeated, text_of
from autotrain_mem.support.errors import DatasetFormatError, UsageError

takes_model_name = False
adapter_rate = (8e-5, "TRL's example with LoRA")
"""``examples/scripts/orpo.py`` and ``cpo.py``: ten times the rate of their examples without LoRA."""


def build_pairs_trainer(
    home: str, filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None
) -> Any:
    """Builds a trainer of ``trl.experimental``. ``home``: the trainer's package, such as ``trl.experimental.orpo``."""
    common = with_policy(filled, model, stub)
    return _class_of(home)(train_dataset=train_dataset, eval_dataset=eval_dataset, **common)


def _class_of(home: str) -> Any:
    return getattr(importlib.import_module(home), f"{home.rpartition('.')[2].upper()}Trainer")


def with_policy(filled: Configs, model: str, stub: Any) -> dict[str, Any]:
    """Returns the arguments of a trainer that takes a model object. The model is loaded as in
    ``trl/trainer/dpo_trainer.py: __init__``: with several processes, accelerate places it."""
    from trl.trainer.utils import create_model_from_path

    common, loading = arguments_of_loaded(filled, model, stub)
    filled.training.model_init_kwargs = None  # these trainers accept it only with a model name
    if str(filled.training.distributed_state.distributed_type.value) in ("MULTI_GPU", "DEEPSPEED"):
        loading["device_map"] = None
    policy = create_model_from_path(model, **loading)
    return {**common, "model": policy, "processing_class": stub or own_tokenizer(filled, model)}


build_trainer = partial(build_pairs_trainer, "trl.experimental.orpo")


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Makes pairs that fill ``length`` tokens, nearly all of them in the prompt: a batch holds prompts a second time by
    themselves, and logits cover prompt and answer. TRL adds an end token."""
    prompt = max(1, length - 2)
    answer = text_of(max(0, length - prompt - 1))
    return repeated({"prompt": text_of(prompt), "chosen": answer, "rejected": answer}, rows)


def rows_editor(filled: Configs) -> EditRows:
    """Returns a function that shortens the last rejected sequence, so that a batch is padded as a real one is."""

    def shorten_last_rejected(rows: list[Any]) -> list[Any]:
        *full, last = rows
        rejected = [name for name, value in last.items() if name.startswith("rejected_") and isinstance(value, list)]
        return [*full, {**last, **{name: last[name][:-1] for name in rejected}}]

    return shorten_last_rejected


def pair_row_lengths(home: str, filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Counts the tokens of both sequences of each pair, prompt included, as the trainer prepares them, without
    truncation. Raises DatasetFormatError if some rows would stay longer than the user's ``max_length``."""
    count = partial(count_prepared, _class_of(home), filled, split, padding(tokenizer))
    lengths, limit = count(limit=sys.maxsize), filled.training.max_length
    # TRL cuts no prompt; 1.12 cuts answers to max_length minus the longer one (``orpo_trainer.py: tokenize_row``).
    is_cut = limit is not None and limit < max(lengths.longer, default=0)
    if longer := [tokens for tokens in (count(limit=limit).longer if is_cut else ()) if tokens > limit]:
        raise DatasetFormatError(
            f"{len(longer):,} rows stay longer than --max_length {limit}, the longest {max(longer):,} tokens: "
            f"TRL's {_class_of(home).__name__} cuts answers, but never a prompt.",
            hint="Give --max_length auto for the length of the longest row, or remove these rows.",
        )
    return lengths


row_lengths = partial(pair_row_lengths, "trl.experimental.orpo")


def check(filled: Configs) -> None:
    """Raises UsageError for arguments that the trainer would misinterpret, and for sampling during evaluation."""
    training = filled.training
    if training.max_length is None:
        raise UsageError(
            "TRL's trainer would take --max_length none as a limit of 512 tokens.",
            hint="Give a number, or --max_length auto for the length of the longest row.",
        )
    if training.generate_during_eval:
        raise UsageError(
            "--generate_during_eval is not supported yet: its samples are not rehearsed.", hint="Remove it."
        )
    if training.max_completion_length is not None or training.is_encoder_decoder is not None:
        raise UsageError(
            "--max_completion_length and --is_encoder_decoder are for encoder-decoder models, and this is a decoder.",
            hint="Remove them: --max_length limits prompt and answer together.",
        )


def why_not_split(trainer: Any) -> str | None:
    """Returns why the loss cannot be split: it has means over tokens and over pairs
    (``orpo_trainer.py: get_batch_loss_metrics``)."""
    return "its loss is a mean over the chosen rows' tokens minus a mean over pairs"
