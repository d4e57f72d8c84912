"""Looks at every row before TRL tokenizes it, so that a bad one is named by its line and not by a traceback."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from autotrain_mem.support.errors import DatasetFormatError, MalformedDatasetError

_MENDED = "Drop or mend such rows."
_CONVERSATION = (
    'A conversation is a list of at least one message, {"role": "user", "content": "..."} or {"from": "human", '
    '"value": "..."}. '
)
_TOKENIZED = "Tokenized rows are lists of at least one whole number. "


def check_rows(split: Any, columns: tuple[str, ...], name: str) -> None:
    """Reads every row of a datasets.Dataset once.

    Args:
        columns: What the method reads: see :func:`autotrain_mem.data.load.columns_read`.
        name: The file, folder or hub id, for the message.

    Raises:
        DatasetFormatError: values of the wrong kind; names the first row and counts the others.
        MalformedDatasetError: text that is not UTF-8.
    """
    bad: list[int] = []
    kept = split.select_columns(list(columns)).with_format(None)
    try:
        for number, row in enumerate(kept):
            if not _is_good(row):
                bad.append(number)
    except UnicodeDecodeError as error:
        raise MalformedDatasetError(
            f"{name} holds text that is not UTF-8: {undecodable_line(pathlib.Path(name)) or error}.",
            hint="Save the file as UTF-8.",
        ) from error
    if bad:
        raise _bad_rows({column: kept[bad[0]][column] for column in columns}, bad, name)


def undecodable_line(path: pathlib.Path) -> str:
    """``line 3``, the first that is not UTF-8; empty for what is not a file of lines."""
    if path.suffix.lower() not in (".json", ".jsonl", ".csv"):
        return ""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return f"line {number}"
    return ""


def _bad_rows(first: Mapping[str, Any], bad: list[int], name: str) -> DatasetFormatError:
    others = f", and {len(bad) - 1} more such row{'s' if len(bad) > 2 else ''}" if len(bad) > 1 else ""
    values = ", ".join(f"{column} {_kind(value)}" for column, value in first.items())
    return DatasetFormatError(
        f"{name} cannot be trained on: in {_place(pathlib.Path(name), bad[0])}, {values}{others}.",
        hint=_right_values(tuple(first)) + _MENDED,
    )


def _right_values(columns: tuple[str, ...]) -> str:
    """Says what stands in these columns where nothing is wrong."""
    rights = []
    if any(column.endswith("_ids") for column in columns):
        rights.append(_TOKENIZED)
    if alike := [column for column in columns if column in _ALIKE]:
        names = " and ".join([", ".join(alike[:-1]), alike[-1]]) if len(alike) > 1 else ""
        subject = f"The values of {names} are all texts, or all" if names else "Prompts are texts, or"
        rights.append(f"{subject} conversations. {_CONVERSATION}")
    if any(column in _CONVERSATIONS for column in columns):
        rights.append(_CONVERSATION)
    if _LABEL in columns:
        rights.append(f"Every value of {_LABEL} is true or false. ")
    return "".join(rights) or f"Every value of {columns[0]} is a text, not null and not a number. "


def _kind(value: Any) -> str:
    """``is empty``, ``is a whole number``, or what else is wrong with it."""
    if value is None:
        return "is null"
    if isinstance(value, (list, str)) and not value:
        return "is empty"
    if _is_conversation(value):
        return "is a conversation"
    if isinstance(value, list):
        return "is a list with an item that does not belong there"
    names = {str: "is a text", bool: "is true or false", int: "is a whole number", float: "is a number"}
    return names.get(type(value), "is an object")


def _place(path: pathlib.Path, row: int) -> str:
    """``line 7`` of a .jsonl file, where blank lines count but hold no row; else ``row 6``."""
    if path.suffix.lower() == ".jsonl":
        with open(path, "rb") as lines:
            filled = (number for number, line in enumerate(lines, 1) if line.strip())
            for place, number in enumerate(filled):
                if place == row:
                    return f"line {number}"
    return f"row {row + 1}"


def _is_conversation(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(
        isinstance(message, dict) and isinstance(message.get("role") or message.get("from"), str) for message in value
    )


_ALIKE = ("prompt", "completion", "chosen", "rejected")
_CONVERSATIONS = ("messages", "conversations")
_LABEL = "label"


def _is_good(row: Mapping[str, Any]) -> bool:
    """Whether every column that a method reads holds what a column of its name should."""
    alike = [value for column, value in row.items() if column in _ALIKE]
    all_texts = all(isinstance(value, str) for value in alike)
    return (all_texts or all(map(_is_conversation, alike))) and all(
        _is_good_value(column, value) for column, value in row.items() if column not in _ALIKE
    )


def _is_good_value(column: str, value: Any) -> bool:
    if column.endswith("_ids"):
        return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
    if column in _CONVERSATIONS:
        return _is_conversation(value)
    return value in (True, False) if column == _LABEL else isinstance(value, str)
