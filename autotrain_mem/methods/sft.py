"""Supervised fine-tuning with TRL's SFTTrainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autotrain_mem.columns import list_lengths
from autotrain_mem.methods import defaults
from autotrain_mem.methods.configs import Configs, fill, script_parser, trainer_arguments
from autotrain_mem.methods.interface import EditRows
from autotrain_mem.methods.loss_basis import Basis
from autotrain_mem.methods.row_lengths import RowLengths, smallest_model, without_labels
from autotrain_mem.methods.worst_case_text import ORDINARY_TOKEN, shorten_last_row


def make_parser() -> Any:
    """TRL's own parser of ``trl sft``."""
    return script_parser("sft")


def configs(arguments: Mapping[str, Any]) -> Configs:
    """TRL's dataclasses, filled."""
    from trl import ScriptArguments, SFTConfig

    return fill(ScriptArguments, SFTConfig, arguments)


rehearsal_changes = defaults.rehearsal_changes


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """The installed SFTTrainer as ``trl sft`` builds it."""
    from trl import SFTTrainer

    common = trainer_arguments(filled, model, stub)
    return SFTTrainer(train_dataset=train_dataset, eval_dataset=eval_dataset, **common)


without_precomputing = defaults.without_precomputing


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Rows that fill ``length`` tokens.

    Packed blocks are full whatever the rows; each gets two documents, since the mask that keeps documents apart is part
    of what a packed batch costs.
    """
    from datasets import Dataset

    half = length // 2
    lengths = [length] * rows if not filled.training.packing or half == 0 else [length - half, half] * rows
    return Dataset.from_dict({"input_ids": [[ORDINARY_TOKEN] * tokens for tokens in lengths]})


def rows_editor(filled: Configs) -> EditRows:
    """Padding-free batches have no padding to imitate."""
    return list if filled.training.packing or filled.training.padding_free else shorten_last_row


training_patches = defaults.training_patches


def row_lengths(
    filled: Configs, split: Any, tokenizer: Any, formatting: Callable[[Any], str] | None = None
) -> RowLengths:
    """Let the trainer prepare the data untruncated, and count."""
    from trl import SFTTrainer

    training = filled.training
    training.max_length, training.packing, training.padding_free = None, False, False
    rows = {"train_dataset": split, "formatting_func": formatting}
    with without_labels():
        trainer = SFTTrainer(model=smallest_model(), args=training, processing_class=tokenizer, **rows)
    return RowLengths(longer=list_lengths(trainer.train_dataset, "input_ids"))


check = defaults.check
tokenizer_findings = defaults.tokenizer_findings
why_not_split = defaults.why_not_split


def loss_basis(trainer: Any, *, is_counted: bool) -> Basis:
    """A mean over tokens; over those of all micro-batches where transformers counted them."""
    return Basis.WHOLE if is_counted else Basis.TOKENS


def logged_basis(trainer: Any, name: str) -> Basis:
    """What is known of the tokens is a mean over them."""
    return Basis.TOKENS if name in ("entropy", "mean_token_accuracy") else Basis.UNITS
