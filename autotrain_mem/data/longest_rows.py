"""Finds the rows of the training data with the most tokens. Runs in the training process."""

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

from autotrain_mem.data.image_sizes import has_images, pixels, row_image_sizes
from autotrain_mem.methods.interface import method_of_trainer
from autotrain_mem.methods.row_lengths import prepared_lengths

CANDIDATES = 64
"""Number of prompts or conversations that are tokenized: those with the most characters."""


def longest_rows(lengths: Sequence[Any], count: int, *, padded: bool = False) -> list[int]:
    """Returns the indices of the longest rows, longest first; equal ones are in the data's order.

    >>> longest_rows([5, 9, 2, 9], 3), longest_rows([3], 8)
    ([1, 3, 0], [0])
    >>> longest_rows([9, 5, 9, 6], 2, padded=True)
    [0, 3]

    ``lengths``: Numbers, or tuples of them, compared in order. ``padded``: whether to replace the last of equally long
    rows by the longest shorter one. Without any padding, attention needs no mask, and less memory
    (``transformers/integrations/sdpa_attention.py: use_gqa_in_sdpa``)."""
    longest = heapq.nlargest(count, range(len(lengths)), key=lengths.__getitem__)
    if padded and len(longest) > 1 and lengths[longest[-1]] == lengths[longest[0]]:
        shorter = (number for number, length in enumerate(lengths) if length < lengths[longest[0]])
        longest[-1] = max(shorter, key=lengths.__getitem__, default=longest[-1])
    return longest


def cut(lengths: Sequence[int], args: Any) -> Sequence[int]:
    """Returns the lengths after a collator's truncation (``trl/trainer/dpo_trainer.py: DataCollatorForPreference``)."""
    limit: int | None = getattr(args, "max_length", None)
    return lengths if limit is None else [min(length, limit) for length in lengths]


def is_padded(args: Any) -> bool:
    """Returns whether a trainer's arguments pad the rows of a batch to the longest."""
    return not (getattr(args, "packing", False) or getattr(args, "padding_free", False))


def repeated(numbers: Sequence[int], count: int) -> list[int]:
    """Returns ``count`` items, starting over from the first if there are fewer.

    >>> repeated([1, 0], 3)
    [1, 0, 1]
    """
    return list(itertools.islice(itertools.cycle(numbers), count))


def fetched(trainer: Any, dataset: Any, numbers: list[int]) -> list[Any]:
    """Returns rows as ``torch/utils/data/_utils/fetch.py: _MapDatasetFetcher`` does, with the dataloader's columns."""
    return list(trainer._remove_unused_columns(dataset, description="training").__getitems__(numbers))


def characters(prompt: Any) -> int:
    """Counts the characters of a text, or of all messages of a conversation, whose content may be in blocks.

    >>> characters("two"), characters([{"role": "user", "content": [{"type": "text", "text": "four"}]}])
    (3, 4)
    """
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, dict):
        return sum(characters(prompt[name]) for name in ("content", "text") if prompt.get(name))
    return sum(map(characters, prompt)) if isinstance(prompt, list) else 0


def are_conversations(trainer: Any, dataset: Any) -> bool:
    """Returns whether the rows are conversations that this trainer's collator tokenizes."""
    method = method_of_trainer(trainer)
    is_collated = method is not None and method.unprepared_lengths(trainer, []) is not None
    return is_collated and "messages" in dataset.column_names and prepared_lengths(dataset) is None


def longest_conversations(trainer: Any, dataset: Any, count: int) -> tuple[list[int], int]:
    """Returns the indices of the longest rows, and the tokens of the longest. Candidates have the most characters, in
    total or before their last message, which the trainer may generate itself."""
    method = method_of_trainer(trainer)
    assert method is not None, "asked before"
    whole, before = [], []
    for rows in dataset.select_columns(["messages"]).iter(batch_size=10_000):
        whole += [characters(messages) for messages in rows["messages"]]
        before += [characters(messages[:-1]) for messages in rows["messages"]]
    looked_at = max(count, CANDIDATES)
    candidates = list(dict.fromkeys([*longest_rows(whole, looked_at), *longest_rows(before, looked_at)]))
    tokens = method.unprepared_lengths(trainer, [dataset[number] for number in candidates])
    assert tokens is not None, "asked before"
    longest = longest_rows(tokens, count, padded=True)
    return [candidates[each] for each in longest], tokens[longest[0]]


def samples_completions(trainer: Any) -> bool:
    """Returns whether a trainer's batches consist of sampled completions: GRPO, RLOO, online DPO, distillation."""
    return hasattr(trainer, "_generate_and_score_completions")


def longest_of(trainer: Any, dataset: Any, count: int) -> tuple[list[int], int]:
    """Returns the indices of the longest rows or prompts, and the tokens of the longest. Raises DatasetFormatError
    if an image cannot be read."""
    if (prepared := prepared_lengths(dataset)) is None and has_images(dataset.column_names):
        return longest_image_rows(trainer, dataset, count)
    if are_conversations(trainer, dataset):
        return longest_conversations(trainer, dataset, count)
    if prepared is None:
        return longest_prompts(trainer, dataset, count)
    lengths = cut(prepared.longer, trainer.args)
    longest = longest_rows(lengths, count, padded=is_padded(trainer.args))
    return longest, lengths[longest[0]]


def longest_prompts(trainer: Any, dataset: Any, count: int) -> tuple[list[int], int]:
    """Returns the indices of the longest prompts, among those with the most characters, and the longest's tokens."""
    prompts = dataset.select_columns(["prompt"])
    texts = [characters(prompt) for rows in prompts.iter(batch_size=10_000) for prompt in rows["prompt"]]
    candidates = longest_rows(texts, max(count, CANDIDATES))
    tokens = [len(ids) for ids in trainer._tokenize_prompts(prompts[candidates]["prompt"])[0]]
    longest = longest_rows(tokens, count, padded=True)
    return [candidates[each] for each in longest], tokens[longest[0]]


FEWEST_CANDIDATES = 8
"""The fewest candidates of each kind; a row with images of a million pixels takes a tenth of a second."""

_TEXTS = ("messages", "prompt", "completion", "chosen", "rejected")


def longest_image_rows(trainer: Any, dataset: Any, count: int) -> tuple[list[int], int]:
    """Returns the indices of the longest rows among those with the most pixels, images or text, and the tokens of the
    longest; equally long rows are ordered by pixels. Raises as :func:`longest_of` does."""
    known = (*_TEXTS, getattr(trainer.args, "dataset_text_field", None))
    columns = [name for name in dataset.column_names if name in known]
    characters_of_rows = [0] * len(dataset)
    if columns:
        tables = dataset.select_columns(columns).with_format("arrow").iter(batch_size=1000)
        characters_of_rows = [sum(map(characters, row.values())) for table in tables for row in table.to_pylist()]
    sizes = row_image_sizes(dataset.with_format(None))
    weights = list(zip(map(pixels, sizes), map(len, sizes), characters_of_rows, strict=True))
    orders = [weights, [(images, area, text) for area, images, text in weights], [weight[::-1] for weight in weights]]
    each = max(count, FEWEST_CANDIDATES)
    found = {number for order in orders for number in longest_rows(order, each)}
    candidates = sorted(found, key=weights.__getitem__, reverse=True)
    tokens = [tokens_of(trainer, dataset, number) for number in candidates]
    longest = longest_rows(tokens, count, padded=is_padded(trainer.args))
    return [candidates[at] for at in longest], tokens[longest[0]]


def tokens_of(trainer: Any, dataset: Any, number: int) -> int:
    """Counts a row's tokens as the trainer makes them; for a pair, those of the longer sequence."""
    from trl.data_utils import prepare_multimodal_messages  # slow to import

    (row,) = fetched(trainer, dataset, [number])
    if not samples_completions(trainer):
        return int(trainer.data_collator([row])["input_ids"].shape[1])
    given = row.get("images") if "images" in row else [row["image"]]
    images = [image for image in given or [] if image is not None]
    prompt = prepare_multimodal_messages(row["prompt"], images=images)
    return len(trainer._tokenize_prompts([prompt])[0][0])
