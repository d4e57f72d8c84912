"""Reward modelling with TRL's RewardTrainer: a head of one score, trained on pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autotrain_mem.columns import list_lengths
from autotrain_mem.methods import defaults
from autotrain_mem.methods.configs import Configs, fill, script_parser, trainer_arguments
from autotrain_mem.methods.interface import EditRows
from autotrain_mem.methods.loss_basis import Basis
from autotrain_mem.methods.row_lengths import RowLengths, pair_lengths, smallest_model
from autotrain_mem.methods.worst_case_text import ORDINARY_TOKEN, shorten_last_rejected
from autotrain_mem.spec.preflight import Finding

LORA_TASK = {"lora_task_type": "SEQ_CLS"}


def make_parser() -> Any:
    """TRL's own parser of ``trl reward``."""
    return script_parser("reward")


def configs(arguments: Mapping[str, Any]) -> Configs:
    """TRL's dataclasses, filled.

    LoRA's task is SEQ_CLS unless given: PEFT then trains the new head with the adapter, which TRL's own default
    (CAUSAL_LM) would leave frozen as it was drawn (trl/trainer/model_config.py: lora_task_type).
    """
    from trl import RewardConfig, ScriptArguments

    return fill(ScriptArguments, RewardConfig, {**LORA_TASK, **arguments})


rehearsal_changes = defaults.rehearsal_changes


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """The installed RewardTrainer as ``trl reward`` builds it."""
    from trl import RewardTrainer

    common = trainer_arguments(filled, model, stub)
    return RewardTrainer(train_dataset=train_dataset, eval_dataset=eval_dataset, **common)


without_precomputing = defaults.without_precomputing


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Pairs whose two sequences both fill ``length`` tokens: the collator makes one batch of them."""
    from datasets import Dataset

    full = [[ORDINARY_TOKEN] * length] * rows
    return Dataset.from_dict({"chosen_ids": full, "rejected_ids": full})


def rows_editor(filled: Configs) -> EditRows:
    """Every real batch of pairs is padded."""
    return shorten_last_rejected


training_patches = defaults.training_patches


def row_lengths(filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Let the trainer prepare the data unfiltered; a pair is as long as its longer side, by which TRL filters."""
    from trl import RewardTrainer

    filled.training.max_length = None
    trainer = RewardTrainer(
        model=smallest_model(classifier=True), args=filled.training, train_dataset=split, processing_class=tokenizer
    )
    rows = trainer.train_dataset
    return pair_lengths(list_lengths(rows, "chosen_ids"), list_lengths(rows, "rejected_ids"))


check = defaults.check


def tokenizer_findings(filled: Configs, tokenizer: Any) -> Iterator[Finding]:
    """Warn where padding looks like an end.

    The score is read at the last token that is no padding, by its id (``transformers/modeling_layers.py:
    GenericForSequenceClassification.forward``). TRL ends every sequence with the end token.
    """
    padding = filled.training.pad_token or tokenizer.pad_token or tokenizer.eos_token
    end = filled.training.eos_token or tokenizer.eos_token
    if padding is not None and padding == end:
        yield Finding(
            kind="warning",
            message=f"The padding token is the end token ({end!r}): a reward model reads its score at the last token "
            "that is no padding, so it never sees that a response has ended.",
            cure="Give --pad_token TOKEN, one of the vocabulary that no text uses.",
        )


why_not_split = defaults.why_not_split
loss_basis = defaults.loss_basis


def logged_basis(trainer: Any, name: str) -> Basis:
    """Means over pairs, but for the extremes."""
    return {"min_reward": Basis.LOWEST, "max_reward": Basis.HIGHEST}.get(name, Basis.UNITS)
