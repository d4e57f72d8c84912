"""Lengths of what the columns of a prepared dataset hold, without making Python's lists of it."""

from __future__ import annotations

from operator import add
from typing import Any

_ROWS_AT_ONCE = 10_000


def list_lengths(rows: Any, column: str) -> list[int]:
    """How long the lists in a column of a datasets.Dataset are, without making Python's lists of them: 40 ms for
    200,000 rows of 220 tokens, in place of 5 s."""
    found: list[int] = []
    for batch in rows.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
        for chunk in batch.column(column).chunks:
            found += chunk.value_lengths().to_pylist()
    return found


def row_lengths(rows: Any) -> list[int] | None:
    """Tokens of every row of prepared data; of a pair, those of its longer side with the prompt.

    Where a prompt comes with another row's completion too (KTO), the longer of both counts. None where the columns do
    not tell.
    """
    columns = set(rows.column_names)
    if {"prompt_ids", "completion_ids"} <= columns:
        completions = list_lengths(rows, "completion_ids")
        if "KL_completion_ids" in columns:
            completions = list(map(max, completions, list_lengths(rows, "KL_completion_ids")))
        return list(map(add, list_lengths(rows, "prompt_ids"), completions))
    if {"chosen_ids", "rejected_ids"} <= columns:
        sides = list(map(max, list_lengths(rows, "chosen_ids"), list_lengths(rows, "rejected_ids")))
        return list(map(add, list_lengths(rows, "prompt_ids"), sides)) if "prompt_ids" in columns else sides
    if {"chosen_input_ids", "rejected_input_ids"} <= columns:  # their prompts are in them
        return list(map(max, list_lengths(rows, "chosen_input_ids"), list_lengths(rows, "rejected_input_ids")))
    return list_lengths(rows, "input_ids") if "input_ids" in columns else None
