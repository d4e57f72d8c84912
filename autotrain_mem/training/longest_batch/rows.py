"""Finds the longest rows of the training data, and holds what came of a run of them before the first step."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

OnError = Callable[[BaseException], None]
"""Is shown an error before what stood in for later steps is gone, so that it can be told who held what."""


CANDIDATES = 64
"""Prompts or conversations of most characters, of which those of most tokens are taken: tokenizing all of a large data
set would take minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestBatch:
    """The result of running the longest rows before the first step, or why they were not run."""

    rows: int = 0
    longest_tokens: int = 0
    """Of the longest row; of the longest prompt where completions are sampled."""
    seconds: float = 0.0
    why_not: str = ""
    """Why nothing was run; empty where it was."""


def longest_rows(lengths: Sequence[Any], count: int, *, padded: bool = False) -> list[int]:
    """Numbers of the longest rows, longest first; of equal ones the first in the data.

    >>> longest_rows([5, 9, 2, 9], 3), longest_rows([3], 8)
    ([1, 3, 0], [0])
    >>> longest_rows([9, 5, 9, 6], 2, padded=True)
    [0, 3]

    Args:
        lengths: Numbers, or tuples of them, of which the first counts most.
        padded: Where all of them are equally long, and there are shorter ones, the longest of these comes last. A batch
            without padding takes less than one of the same length with some: attention needs no mask, and repeats no
            keys and values for it (``transformers/integrations/sdpa_attention.py: use_gqa_in_sdpa``).
    """
    longest = heapq.nlargest(count, range(len(lengths)), key=lengths.__getitem__)
    if padded and len(longest) > 1 and lengths[longest[-1]] == lengths[longest[0]]:
        shorter = (number for number, length in enumerate(lengths) if length < lengths[longest[0]])
        longest[-1] = max(shorter, key=lengths.__getitem__, default=longest[-1])
    return longest


def cut(lengths: Sequence[int], args: Any) -> Sequence[int]:
    """Lengths in a batch, by a trainer's arguments: DPO and KTO cut rows only as they make one (``trl/trainer/
    dpo_trainer.py: DataCollatorForPreference``)."""
    limit: int | None = getattr(args, "max_length", None)
    return lengths if limit is None else [min(length, limit) for length in lengths]


def is_padded(args: Any) -> bool:
    """Whether rows of a batch are padded to the longest, by a trainer's arguments."""
    return not (getattr(args, "packing", False) or getattr(args, "padding_free", False))


def repeated(numbers: Sequence[int], count: int) -> list[int]:
    """Take so many of them, from the first on again where there are fewer.

    >>> repeated([1, 0], 3)
    [1, 0, 1]
    """
    return list(itertools.islice(itertools.cycle(numbers), count))


def fetched(trainer: Any, dataset: Any, numbers: list[int]) -> list[Any]:
    """Fetch rows as ``torch/utils/data/_utils/fetch.py: _MapDatasetFetcher`` does, with the dataloader's columns."""
    return list(trainer._remove_unused_columns(dataset, description="training").__getitems__(numbers))


def characters(prompt: Any) -> int:
    """Count the characters of a text, or of all messages of a conversation, whose content may come in blocks.

    >>> characters("two"), characters([{"role": "user", "content": [{"type": "text", "text": "four"}]}])
    (3, 4)
    """
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, dict):
        return sum(characters(prompt[name]) for name in ("content", "text") if prompt.get(name))
    return sum(map(characters, prompt)) if isinstance(prompt, list) else 0
