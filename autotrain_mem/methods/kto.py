"""Kahneman-Tversky optimization with TRL's KTOTrainer: single completions, each labelled desirable or undesirable."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from autotrain_mem.methods import dpo, image_rows
from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.image_rows import RowImages
from autotrain_mem.methods.row_lengths import RowLengths, prepared_lengths
from autotrain_mem.methods.worst_case_text import EditRows, shorten_last_row, text_of

liger_since = None


def least_rows(arguments: Mapping[str, Any]) -> int:
    """Returns 2: the KL divergence is estimated by pairing prompts with their neighbours' completions
    (``trl/trainer/kto_trainer.py: __init__``); 1 for a loss without it."""
    return 1 if arguments.get("loss_type") == "apo_zero_unpaired" else 2


without_precomputing = partial(
    dpo.without_scoring,
    "KTOTrainer",
    lambda trainer: ("ref_logps", "ref_KL_logps") if trainer.calculate_KL else ("ref_logps",),
)


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Makes rows that fill ``length`` tokens, nearly all in the completion, and all desirable.

    For its metrics the trainer copies the logits of all desirable rows, then those of their completions' tokens
    (``trl/trainer/kto_trainer.py: _compute_loss``): rows of one label with long completions need the most. A completion
    paired with another row's prompt, to estimate the KL divergence, has the same length.
    """
    from datasets import Dataset

    completion = text_of(max(1, length - 2))  # TRL adds an end
    return Dataset.from_dict({"prompt": [text_of(1)] * rows, "completion": [completion] * rows, "label": [True] * rows})


def rows_editor(filled: Configs) -> EditRows:
    """Imitates the padding of a batch of several rows, which also pads their prompts with other completions."""
    return shorten_last_row


def worst_image_rows(filled: Configs, length: int, rows: int, images: RowImages) -> Any:
    """Makes such rows with the images in the prompt; TRL adds no end to the completion of a row with images."""
    return image_rows.labelled(length, rows, images)


def image_rows_editor(filled: Configs) -> EditRows:
    """Imitates padding."""
    return image_rows.shorten_last("completion")


training_patches = partial(dpo.strided_logps, "trl.trainer.kto_trainer")


def row_lengths(filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Counts tokens as the trainer prepares them; a row's length is its prompt's with the longer of two completions.

    One is its own; the other is the previous row's, with which TRL estimates the KL divergence. The first row of a
    micro-batch gets the last row's, so these few lengths depend on the micro-batch size. Truncation applies to all.
    """
    lengths = prepared_lengths(dpo.prepared_rows("KTOTrainer", filled, split, tokenizer))
    assert lengths is not None, "TRL names its columns otherwise"
    return RowLengths(longer=lengths)


image_texts = image_rows.completion_texts


def why_not_split(trainer: Any) -> str | None:
    """Returns that the KL divergence is a mean over the micro-batch; without it, that the metrics compare its rows."""
    if trainer.calculate_KL:
        return "its KL divergence is estimated over the rows of a micro-batch"
    return "what it logs compares the desirable rows of a micro-batch with the undesirable ones"
