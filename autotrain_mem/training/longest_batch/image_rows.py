"""Finds the rows with images that need most. Their trainers prepare nothing: the collator reads and tokenizes them
(``trl/trainer/sft_trainer.py: __init__, skip_prepare_dataset``), so that no column says how long they are."""

from __future__ import annotations

from typing import Any

from trl.data_utils import prepare_multimodal_messages

from autotrain_mem.data.image_sizes import has_images, pixels, row_image_sizes
from autotrain_mem.methods.row_lengths import prepared_lengths
from autotrain_mem.training.longest_batch.rows import characters, fetched, is_padded, longest_rows

FEWEST_CANDIDATES = 8
"""Of each kind. To read and tokenize a row takes a tenth of a second where its images have a million pixels; of a
large data set all would take hours."""

_TEXTS = ("messages", "prompt", "completion", "chosen", "rejected")
_ROWS_AT_ONCE = 1000


def are_image_rows(dataset: Any) -> bool:
    """Whether a trainer's data have images, and nothing that was prepared."""
    return has_images(dataset.column_names) and prepared_lengths(dataset) is None


def longest_image_rows(trainer: Any, dataset: Any, count: int) -> tuple[list[int], int]:
    """Give the numbers of the rows of most tokens, and the tokens of the longest.

    They are sought among those of most pixels, those of most images (which some models shrink to one size) and those of
    most text; of equally many tokens, the most pixels come first. The trainer's own collator or tokenization counts.

    Raises:
        DatasetFormatError: an image that cannot be read.
    """
    sizes = row_image_sizes(dataset.with_format(None))
    weights = list(zip(map(pixels, sizes), map(len, sizes), _text_lengths(trainer, dataset), strict=True))
    orders = [weights, [(images, area, text) for area, images, text in weights], [weight[::-1] for weight in weights]]
    each = max(count, FEWEST_CANDIDATES)
    found = {number for order in orders for number in longest_rows(order, each)}
    candidates = sorted(found, key=weights.__getitem__, reverse=True)
    tokens = [tokens_of(trainer, dataset, number) for number in candidates]
    longest = longest_rows(tokens, count, padded=is_padded(trainer.args))
    return [candidates[at] for at in longest], tokens[longest[0]]


def tokens_of(trainer: Any, dataset: Any, number: int) -> int:
    """Count a row's tokens as the trainer makes them: of a pair, those of the longer side; of a prompt, its own."""
    (row,) = fetched(trainer, dataset, [number])
    if not hasattr(trainer, "_generate_and_score_completions"):
        return int(trainer.data_collator([row])["input_ids"].shape[1])
    given = row.get("images") if "images" in row else [row["image"]]
    images = [image for image in given or [] if image is not None]
    prompt = prepare_multimodal_messages(row["prompt"], images=images)
    return len(trainer._tokenize_prompts([prompt])[0][0])


def _text_lengths(trainer: Any, dataset: Any) -> list[int]:
    """Characters of each row, whatever they are of."""
    known = (*_TEXTS, getattr(trainer.args, "dataset_text_field", None))
    texts = [name for name in dataset.column_names if name in known]
    if not texts:
        return [0] * len(dataset)
    tables = dataset.select_columns(texts).with_format("arrow").iter(batch_size=_ROWS_AT_ONCE)
    return [sum(map(characters, row.values())) for table in tables for row in table.to_pylist()]
