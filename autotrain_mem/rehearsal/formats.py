"""The dataset formats of TRL's trainers, by their columns, and what to call them."""

from __future__ import annotations

from collections.abc import Sequence

from autotrain_mem.rehearsal.configs import Configs
from autotrain_mem.rehearsal.methods.method import method_of

_NAMES = {
    ("prompt", "chosen", "rejected"): "preferences (prompt, chosen, rejected)",
    ("chosen", "rejected"): "preferences without a prompt (chosen, rejected)",
    ("chosen_ids", "rejected_ids"): "tokenized preferences (chosen_ids, rejected_ids)",
    ("prompt", "completion", "label"): "unpaired preferences (prompt, completion, label)",
    ("input_ids",): "tokenized rows (input_ids)",
    ("prompt", "completion"): "prompts with completions (prompt, completion)",
    ("messages",): "conversations (messages)",
    ("conversations",): "conversations (conversations)",
    ("prompt",): "prompts (prompt)",
    ("text",): "plain text (text)",
}
"""By the columns that are looked for, the most telling first; the formats are those of TRL's documentation."""


def columns_read(method: str, columns: Sequence[str], filled: Configs) -> tuple[str, ...]:
    """The columns that the method trains on; empty when it finds none of its sets of columns."""
    found = [needed for needed in _formats(method, filled) if set(needed) <= set(columns)]
    return found[0] if found else ()


def format_name(columns: Sequence[str]) -> str:
    """``plain text (text)``: what a dataset with these columns is."""
    return next((name for needed, name in _NAMES.items() if set(needed) <= set(columns)), "no format that TRL knows")


def formats_wanted(method: str, filled: Configs) -> str:
    """``prompts (prompt), or ...``: what the method reads."""
    names = [_NAMES.get(needed, f"plain text ({needed[0]})") for needed in _formats(method, filled)]
    text = " (--dataset_text_field names another column of text)" if method == "sft" else ""
    return f"{', or '.join(names)}{text}"


def _formats(method: str, filled: Configs) -> list[tuple[str, ...]]:
    """SFT also reads a column of text, whose name is a setting."""
    formats = list(method_of(method).FORMATS)
    return [*formats, (filled.training.dataset_text_field,)] if method == "sft" else formats
