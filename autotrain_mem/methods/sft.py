"""Supervised fine-tuning with TRL's SFTTrainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from autotrain_mem.columns import list_lengths
from autotrain_mem.methods.configs import Configs, fill, trainer_arguments
from autotrain_mem.methods.interface import EditRows
from autotrain_mem.methods.row_lengths import RowLengths, without_labels
from autotrain_mem.methods.small import smallest_model
from autotrain_mem.methods.worst_case_text import ORDINARY_TOKEN, shorten_last_row
from autotrain_mem.spec import Knobs


def make_parser() -> Any:
    """TRL's own parser of ``trl sft``."""
    from trl.scripts.sft import make_parser as make_trl_parser

    return make_trl_parser(prog="autofit sft")


def configs(arguments: Mapping[str, Any]) -> Configs:
    """TRL's dataclasses, filled."""
    from trl import ScriptArguments, SFTConfig

    return fill(ScriptArguments, SFTConfig, arguments)


def rehearsal_changes(arguments: Mapping[str, Any], knobs: Knobs) -> dict[str, Any]:
    """Nothing is different."""
    return {}


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """The installed SFTTrainer as ``trl sft`` builds it."""
    from trl import SFTTrainer

    common = trainer_arguments(filled, model, stub)
    return SFTTrainer(train_dataset=train_dataset, eval_dataset=eval_dataset, **common)


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


def training_patches(trainer: Any, filled: Configs, knobs: Knobs) -> AbstractContextManager[None]:
    """Nothing to arrange: the trainer's data are all there is."""
    return nullcontext()


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


def check(filled: Configs, *, to_train: bool) -> None:
    """Nothing beyond what TRL's config refuses by itself."""
