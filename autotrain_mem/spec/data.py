"""What a dataset's token lengths say about truncation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DataProfile:
    """Token lengths of a dataset after the trainer's own formatting, as a histogram.

    Example: ``DataProfile(rows_by_length={10: 99, 80: 1}).truncated_rows_fraction(40) == 0.01``.
    """

    rows_by_length: Mapping[int, int]
    """How many rows have each length, in tokens."""
    longest_evaluated: int = 0
    """Tokens of the longest row of the split that is evaluated; 0 where none is."""

    @property
    def rows(self) -> int:
        return sum(self.rows_by_length.values())

    @property
    def tokens(self) -> int:
        return sum(length * rows for length, rows in self.rows_by_length.items())

    @property
    def longest(self) -> int:
        return max(self.rows_by_length)

    @property
    def shortest(self) -> int:
        return min(self.rows_by_length)

    def truncated_rows_fraction(self, max_length: int | None) -> float:
        """Share of rows longer than ``max_length`` tokens."""
        if max_length is None:
            return 0.0
        return sum(rows for length, rows in self.rows_by_length.items() if length > max_length) / self.rows

    def truncated_tokens_fraction(self, max_length: int | None) -> float:
        """Share of all tokens that truncation to ``max_length`` cuts."""
        if max_length is None:
            return 0.0
        cut = sum((length - max_length) * rows for length, rows in self.rows_by_length.items() if length > max_length)
        return cut / self.tokens
