"""Direct preference optimization with TRL's DPOTrainer: a policy held against a reference."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import add
from typing import Any
from unittest.mock import patch

from autotrain_mem.columns import list_lengths
from autotrain_mem.methods import defaults
from autotrain_mem.methods.configs import Configs, fill, script_parser, trainer_arguments
from autotrain_mem.methods.interface import EditRows
from autotrain_mem.methods.loss_basis import Basis
from autotrain_mem.methods.row_lengths import RowLengths, pair_lengths, smallest_model
from autotrain_mem.methods.strided_views import strided_log_softmax
from autotrain_mem.methods.worst_case_text import shorten_last_rejected, text_of
from autotrain_mem.spec import Knobs


def make_parser() -> Any:
    """TRL's own parser of ``trl dpo``."""
    return script_parser("dpo")


def configs(arguments: Mapping[str, Any]) -> Configs:
    """TRL's dataclasses, filled."""
    from trl import DPOConfig, ScriptArguments

    return fill(ScriptArguments, DPOConfig, arguments)


rehearsal_changes = defaults.rehearsal_changes


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """The installed DPOTrainer as ``trl dpo`` builds it.

    TRL itself decides on the reference: a second model, the adapter switched off, or log-probabilities computed before
    training (``precompute_ref_log_probs``).
    """
    from trl import DPOTrainer

    common = trainer_arguments(filled, model, stub)
    with nullcontext() if stub is None else without_precomputing():
        return DPOTrainer(train_dataset=train_dataset, eval_dataset=eval_dataset, **common)


def without_precomputing() -> AbstractContextManager[Any]:
    """Inside, a trainer that computes the reference's scores before training has them already."""
    from trl import DPOTrainer

    return patch.object(DPOTrainer, "_precompute_ref_logps", _with_scores)


def _with_scores(trainer: Any, dataset: Any, *_: Any) -> Any:
    """The data after the reference scored them, which is a forward without gradients: less than training."""
    scores = [0.0] * len(dataset)
    return dataset.add_column("ref_chosen_logps", scores).add_column("ref_rejected_logps", scores)


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Pairs whose prompt and either completion fill ``length`` tokens: half prompt, half completion."""
    from datasets import Dataset

    prompt = length // 2
    completion = text_of(length - prompt)
    return Dataset.from_dict(
        {"prompt": [text_of(prompt)] * rows, "chosen": [completion] * rows, "rejected": [completion] * rows}
    )


def rows_editor(filled: Configs) -> EditRows:
    """Every real batch of pairs is padded."""
    return shorten_last_rejected


def training_patches(trainer: Any, filled: Configs, knobs: Knobs) -> AbstractContextManager[None]:
    """Let autograd see a view as it sees one of real tensors."""
    from trl.trainer import dpo_trainer

    return strided_log_softmax(dpo_trainer)


def row_lengths(filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Let the trainer prepare the data untruncated; a pair is as long as its prompt with its longer completion."""
    from trl import DPOTrainer

    filled.training.max_length, filled.training.precompute_ref_log_probs = None, False
    trainer = DPOTrainer(
        model=smallest_model(),
        ref_model=smallest_model(),
        args=filled.training,
        train_dataset=split,
        processing_class=tokenizer,
    )
    rows = trainer.train_dataset
    prompts, chosen, rejected = (list_lengths(rows, name) for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
    return pair_lengths(list(map(add, prompts, chosen)), list(map(add, prompts, rejected)))


check = defaults.check
tokenizer_findings = defaults.tokenizer_findings

PAIRWISE = frozenset(
    {
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero"),
        *("apo_down", "discopop", "sigmoid_norm"),
    }
)
"""Losses that are one number per pair, of which the mean is taken."""


def why_not_split(trainer: Any) -> str | None:
    """A loss that compares the pairs of a micro-batch, or means over tokens beside means over pairs."""
    kinds = list(trainer.loss_types)
    others = [kind for kind in kinds if kind not in PAIRWISE]
    if kinds == ["sft"] or not others:
        return None
    if "sft" in others:
        return "loss_type sft is a mean over tokens and stands beside means over pairs"
    return f"loss_type {others[0]} compares each pair with the others of its micro-batch"


def loss_basis(trainer: Any, *, is_counted: bool) -> Basis:
    """A mean over pairs; with loss_type sft alone, over the chosen tokens."""
    return Basis.CHOSEN_TOKENS if list(trainer.loss_types) == ["sft"] else Basis.UNITS


_LOGGED = {
    "entropy": Basis.TOKENS,
    "mean_token_accuracy": Basis.CHOSEN_TOKENS,
    "logits/chosen": Basis.CHOSEN_TOKENS,
    "logits/rejected": Basis.REJECTED_TOKENS,
}


def logged_basis(trainer: Any, name: str) -> Basis:
    """Means over pairs, but for what is known of the tokens."""
    return _LOGGED.get(name, Basis.UNITS)
