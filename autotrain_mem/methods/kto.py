"""Kahneman-Tversky optimization with TRL's KTOTrainer: single completions, each judged desirable or not."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from autotrain_mem.methods import dpo
from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.row_lengths import RowLengths, prepared_lengths
from autotrain_mem.methods.worst_case_text import EditRows, shorten_last_row, text_of

liger_since = None


def least_rows(arguments: Mapping[str, Any]) -> int:
    """Two: the KL divergence is estimated from prompts with their neighbours' completions (``trl/trainer/
    kto_trainer.py: __init__``), but in a loss that goes without."""
    return 1 if arguments.get("loss_type") == "apo_zero_unpaired" else 2


without_precomputing = partial(
    dpo.without_scoring,
    "KTOTrainer",
    lambda trainer: ("ref_logps", "ref_KL_logps") if trainer.calculate_KL else ("ref_logps",),
)


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Makes rows that fill ``length`` tokens, nearly all of them the completion's, and all desirable.

    For its metrics the trainer copies the logits of all desirable rows, and of these those of the completions' tokens
    (``trl/trainer/kto_trainer.py: _compute_loss``): rows of one kind and of long completions need most. A completion
    that is paired with another row's prompt, to estimate the KL divergence, is as long as its own.
    """
    from datasets import Dataset

    completion = text_of(max(1, length - 2))  # TRL adds an end
    return Dataset.from_dict({"prompt": [text_of(1)] * rows, "completion": [completion] * rows, "label": [True] * rows})


def rows_editor(filled: Configs) -> EditRows:
    """Imitates the padding that a batch of several rows has, that of their prompts with other completions too."""
    return shorten_last_row


training_patches = partial(dpo.strided_logps, "trl.trainer.kto_trainer")


def row_lengths(filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Counts tokens as the trainer prepares them; a row is as long as its prompt with the longer of two completions.

    One is its own, the other that of the row before it, with which TRL estimates the KL divergence; for the first row
    of a micro-batch that is the last one's, so that another size of micro-batch moves these few. A length that rows are
    cut to holds for all of them.
    """
    lengths = prepared_lengths(dpo.prepared_rows("KTOTrainer", filled, split, tokenizer))
    assert lengths is not None, "TRL names its columns otherwise"
    return RowLengths(longer=lengths)


def why_not_split(trainer: Any) -> str | None:
    """Says that the KL divergence is a mean over the micro-batch; without it, unlike rows are compared."""
    if trainer.calculate_KL:
        return "its KL divergence is estimated over the rows of a micro-batch"
    return "what it logs compares the desirable rows of a micro-batch with the undesirable ones"
