"""The dataset formats of TRL's trainers, by their columns, and what to call them."""

from __future__ import annotations

from collections.abc import Sequence

from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.table import METHODS

_KINDS = {
    ("prompt", "chosen", "rejected"): "preferences",
    ("chosen", "rejected"): "preferences without a prompt",
    ("chosen_ids", "rejected_ids"): "tokenized preferences",
    ("prompt", "completion", "label"): "unpaired preferences",
    ("input_ids",): "tokenized rows",
    ("prompt", "completion"): "prompts with completions",
    ("messages",): "conversations",
    ("conversations",): "conversations",
    ("prompt",): "prompts",
    ("text",): "plain text",
}
"""By the columns that are looked for, the most telling first; the formats are those of TRL's documentation."""


def columns_read(method: str, columns: Sequence[str], filled: Configs) -> tuple[str, ...]:
    """The columns that the method trains on; empty when it finds none of its sets of columns."""
    found = [needed for needed in _formats(method, filled) if set(needed) <= set(columns)]
    return found[0] if found else ()


def format_name(columns: Sequence[str]) -> str:
    """``plain text``: what a dataset with these columns is."""
    return next((kind for needed, kind in _KINDS.items() if set(needed) <= set(columns)), "no format that TRL knows")


def formats_wanted(method: str, filled: Configs) -> str:
    """``prompts (prompt) or tokenized rows (input_ids)``: what the method reads."""
    columns: dict[str, list[str]] = {}
    for needed in _formats(method, filled):
        columns.setdefault(_KINDS.get(needed, "plain text"), []).append(", ".join(needed))
    *first, last = [f"{kind} ({' or '.join(sets)})" for kind, sets in columns.items()]
    text = " (--dataset_text_field names another column of text)" if METHODS[method].has_text_column else ""
    return (f"{', '.join(first)} or {last}" if first else last) + text


def _formats(method: str, filled: Configs) -> list[tuple[str, ...]]:
    """The method's formats, and the column of text where it reads one, whose name is a setting."""
    formats = list(METHODS[method].formats)
    return [*formats, (filled.training.dataset_text_field,)] if METHODS[method].has_text_column else formats
