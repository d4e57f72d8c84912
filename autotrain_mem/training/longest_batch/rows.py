"""Finds the longest rows of the training data, and holds what came of a run of them before the first step."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

OnError = Callable[[BaseException], None]
"""Is shown an error before what stood in for later steps is gone, so that it can be told who held what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestBatch:
    """The result of running the longest rows before the first step, or why they were not run."""

    rows: int = 0
    longest_tokens: int = 0
    """Of the longest row; of the longest prompt where completions are sampled."""
    seconds: float = 0.0
    why_not: str = ""
    """Why nothing was run; empty where it was."""


def longest_rows(lengths: Sequence[int], count: int) -> list[int]:
    """Numbers of the longest rows, longest first; of equal ones the first in the data.

    >>> longest_rows([5, 9, 2, 9], 3), longest_rows([3], 8)
    ([1, 3, 0], [0])
    """
    return heapq.nlargest(count, range(len(lengths)), key=lengths.__getitem__)


def repeated(numbers: Sequence[int], count: int) -> list[int]:
    """Take so many of them, from the first on again where there are fewer.

    >>> repeated([1, 0], 3)
    [1, 0, 1]
    """
    return list(itertools.islice(itertools.cycle(numbers), count))
