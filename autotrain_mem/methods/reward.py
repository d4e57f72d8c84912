"""Reward modelling with TRL's RewardTrainer: a head of one score, trained on pairs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from autotrain_mem.columns import list_lengths
from autotrain_mem.methods.configs import Configs, fill, trainer_arguments
from autotrain_mem.methods.interface import EditRows
from autotrain_mem.methods.row_lengths import RowLengths, pair_lengths
from autotrain_mem.methods.small import smallest_model
from autotrain_mem.methods.worst_case_text import ORDINARY_TOKEN, shorten_last_rejected
from autotrain_mem.spec import Knobs

LORA_TASK = {"lora_task_type": "SEQ_CLS"}


def make_parser() -> Any:
    """TRL's own parser of ``trl reward``."""
    from trl.scripts.reward import make_parser as make_trl_parser

    return make_trl_parser(prog="autofit reward")


def configs(arguments: Mapping[str, Any]) -> Configs:
    """TRL's dataclasses, filled.

    LoRA's task is SEQ_CLS unless given: PEFT then trains the new head with the adapter, which TRL's own default
    (CAUSAL_LM) would leave frozen as it was drawn (trl/trainer/model_config.py: lora_task_type).
    """
    from trl import RewardConfig, ScriptArguments

    return fill(ScriptArguments, RewardConfig, {**LORA_TASK, **arguments})


def rehearsal_changes(arguments: Mapping[str, Any], knobs: Knobs) -> dict[str, Any]:
    """Nothing is different."""
    return {}


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """The installed RewardTrainer as ``trl reward`` builds it."""
    from trl import RewardTrainer

    common = trainer_arguments(filled, model, stub)
    return RewardTrainer(train_dataset=train_dataset, eval_dataset=eval_dataset, **common)


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Pairs whose two sequences both fill ``length`` tokens: the collator makes one batch of them."""
    from datasets import Dataset

    full = [[ORDINARY_TOKEN] * length] * rows
    return Dataset.from_dict({"chosen_ids": full, "rejected_ids": full})


def rows_editor(filled: Configs) -> EditRows:
    """Every real batch of pairs is padded."""
    return shorten_last_rejected


def training_patches(trainer: Any, filled: Configs, knobs: Knobs) -> AbstractContextManager[None]:
    """Nothing to arrange: the trainer's data are all there is."""
    return nullcontext()


def row_lengths(filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Let the trainer prepare the data unfiltered; a pair is as long as its longer side, by which TRL filters."""
    from trl import RewardTrainer

    filled.training.max_length = None
    trainer = RewardTrainer(
        model=smallest_model(classifier=True), args=filled.training, train_dataset=split, processing_class=tokenizer
    )
    rows = trainer.train_dataset
    return pair_lengths(list_lengths(rows, "chosen_ids"), list_lengths(rows, "rejected_ids"))


def check(filled: Configs, *, to_train: bool) -> None:
    """Nothing beyond what TRL's config refuses by itself."""
