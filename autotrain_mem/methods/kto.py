"""Kahneman-Tversky optimization with TRL's KTOTrainer: single completions, each judged desirable or not."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from autotrain_mem.columns import row_lengths as prepared_lengths
from autotrain_mem.methods import defaults
from autotrain_mem.methods.configs import Configs, fill, script_parser, trainer_arguments
from autotrain_mem.methods.interface import EditRows
from autotrain_mem.methods.row_lengths import RowLengths, smallest_model
from autotrain_mem.methods.strided_views import strided_log_softmax
from autotrain_mem.methods.worst_case_text import shorten_last_row, text_of
from autotrain_mem.spec import Knobs


def make_parser() -> Any:
    """TRL's own parser of ``trl kto``."""
    return script_parser("kto")


def configs(arguments: Mapping[str, Any]) -> Configs:
    """TRL's dataclasses, filled."""
    from trl import KTOConfig, ScriptArguments

    return fill(ScriptArguments, KTOConfig, arguments)


rehearsal_changes = defaults.rehearsal_changes


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """The installed KTOTrainer as ``trl kto`` builds it.

    TRL itself decides on the reference: a second model, the adapter switched off, or log-probabilities computed before
    training (``precompute_ref_log_probs``).
    """
    from trl import KTOTrainer

    common = trainer_arguments(filled, model, stub)
    with nullcontext() if stub is None else without_precomputing():
        return KTOTrainer(train_dataset=train_dataset, eval_dataset=eval_dataset, **common)


def without_precomputing() -> AbstractContextManager[Any]:
    """Inside, a trainer that computes the reference's scores before training has them already."""
    from trl import KTOTrainer

    return patch.object(KTOTrainer, "_precompute_ref_logps", _with_scores)


def _with_scores(trainer: Any, dataset: Any, *_: Any) -> Any:
    """The data after the reference scored them, which is a forward without gradients: less than training."""
    scores = [0.0] * len(dataset)
    scored = dataset.add_column("ref_logps", scores)
    return scored.add_column("ref_KL_logps", scores) if trainer.calculate_KL else scored


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Rows that fill ``length`` tokens, nearly all of them the completion's, and all desirable.

    For its metrics the trainer copies the logits of all desirable rows, and of these those of the completions' tokens
    (``trl/trainer/kto_trainer.py: _compute_loss``): rows of one kind and of long completions need most. A completion
    that is paired with another row's prompt, to estimate the KL divergence, is as long as its own.
    """
    from datasets import Dataset

    completion = text_of(max(1, length - 2))  # TRL adds an end
    return Dataset.from_dict({"prompt": [text_of(1)] * rows, "completion": [completion] * rows, "label": [True] * rows})


def rows_editor(filled: Configs) -> EditRows:
    """A batch of several rows is padded, that of their prompts with other completions too."""
    return shorten_last_row


def training_patches(trainer: Any, filled: Configs, knobs: Knobs) -> AbstractContextManager[None]:
    """Let autograd see a view as it sees one of real tensors."""
    from trl.trainer import kto_trainer

    return strided_log_softmax(kto_trainer)


def row_lengths(filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Let the trainer prepare the data untruncated; a row is as long as its prompt with the longer of two completions.

    One is its own, the other that of the row before it, with which TRL estimates the KL divergence; for the first row
    of a micro-batch that is the last one's, so that another size of micro-batch moves these few. A length that rows are
    cut to holds for all of them.
    """
    from trl import KTOTrainer

    filled.training.max_length, filled.training.precompute_ref_log_probs = None, False
    trainer = KTOTrainer(
        model=smallest_model(),
        ref_model=smallest_model(),
        args=filled.training,
        train_dataset=split,
        processing_class=tokenizer,
    )
    lengths = prepared_lengths(trainer.train_dataset)
    assert lengths is not None, "TRL names its columns otherwise"
    return RowLengths(longer=lengths)


check = defaults.check
tokenizer_findings = defaults.tokenizer_findings


def why_not_split(trainer: Any) -> str | None:
    """The KL divergence is a mean over the micro-batch; without it, desirable and undesirable rows are compared."""
    if trainer.calculate_KL:
        return "its KL divergence is estimated over the rows of a micro-batch"
    return "what it logs compares the desirable rows of a micro-batch with the undesirable ones"


loss_basis = defaults.loss_basis
logged_basis = defaults.logged_basis
