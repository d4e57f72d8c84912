"""Decides which columns of a dataset a method trains on, and what is wrong with a row's values."""

import contextlib
import functools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autotrain_mem.support.data_files import DATA_KINDS, read_head, row_place, suffix_of
from autotrain_mem.support.errors import DatasetFormatError, MalformedDatasetError
from autotrain_mem.types.methods_table import METHODS, TEXT_COLUMN

_KINDS = {
    ("prompt", "chosen", "rejected"): "preferences",
    ("chosen", "rejected"): "preferences without a prompt",
    ("chosen_ids", "rejected_ids"): "tokenized preferences",
    ("chosen_input_ids", "rejected_input_ids"): "tokenized preferences",
    ("prompt", "completion", "label"): "unpaired preferences",
    ("input_ids",): "tokenized rows",
    ("prompt", "completion"): "prompts with completions",
    ("messages",): "conversations",
    ("conversations",): "conversations",
    ("prompt",): "prompts",
    ("text",): "plain text",
}
"""Columns, the most specific first -> the kind of rows, as in TRL's documentation."""
_GOOD_VALUES = """\
Drop or fix these rows. Text is a string. A conversation is a list of at least one message:
{"role": "user", "content": "..."} in a column messages (rename conversations to messages), or
{"from": "human", "value": "..."} in a column conversations. Only a message with tool_calls has no content. The prompt
and the answers of a row are all strings, or all conversations. Tokenized rows are lists of at least one whole number,
labels are true or false. In a .csv file an empty cell, NA and null are no text."""
_SHOWN_CHARACTERS = 40
_ALIKE = ("prompt", "completion", "chosen", "rejected")
_LABEL = "label"
_HEADED = ("json", "csv")
"""The kinds of files whose first rows are read without the datasets library."""


def columns_read(method: str, columns: Sequence[str], text_column: str) -> tuple[str, ...]:
    """Returns the columns that the method trains on; empty if none of its formats matches. ``text_column``: the column
    of plain text."""
    return next((needed for needed in _formats(method, text_column) if set(needed) <= set(columns)), ())


def _formats(method: str, text_column: str) -> list[tuple[str, ...]]:
    return [(text_column,) if each == (TEXT_COLUMN,) else each for each in METHODS[method].formats]


def wrong_format(method: str, columns: Sequence[str], name: str, text_column: str) -> DatasetFormatError:
    """Returns the error for rows whose columns the method does not read. ``name``: the dataset's, for the message."""
    held = next((kind for needed, kind in _KINDS.items() if set(needed) <= set(columns)), "no format that TRL knows")
    wanted: dict[str, list[str]] = {}
    for needed in _formats(method, text_column):
        wanted.setdefault(_KINDS.get(needed, "plain text"), []).append(", ".join(needed))
    *first, last = [f"{kind} ({' or '.join(sets)})" for kind, sets in wanted.items()]
    reads = f"{', '.join(first)} or {last}" if first else last
    text = " (--dataset_text_field names another column of text)" if (TEXT_COLUMN,) in METHODS[method].formats else ""
    return DatasetFormatError(
        f"{name} holds {held} (columns {', '.join(columns)}), and {METHODS[method].trainer} cannot train on that.",
        hint=f"{METHODS[method].trainer} reads {reads}{text}. Rename the columns, or make them from yours.",
    )


def why_bad(row: Mapping[str, Any], template: str | None = None) -> str:
    """Returns what is wrong with the columns of a row that are trained on; empty if their values are of the right kind.
    ``template``: the chat template, which decides about roles and lists of parts; None if unknown.

    >>> why_bad({"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant"}]})
    'message 2 of messages has no content'
    """
    for column, value in row.items():
        if column.endswith("_ids"):
            if not (isinstance(value, list) and value and all(type(token) is int for token in value)):
                return f"{column} is {_shown(value)}, not a list of whole numbers"
        elif column in ("messages", "conversations") or (column in _ALIKE and isinstance(value, list)):
            if why := _why_no_conversation(column, value, template):
                return why
        elif column == _LABEL:
            if value not in (True, False):
                return f"label is {_shown(value)}, not true or false"
        elif not isinstance(value, str):
            return f"{column} is {_shown(value)}, not text{' or a list of messages' if column in _ALIKE else ''}"
    texts, lists = ([side for side in _ALIKE if isinstance(row.get(side), kind)] for kind in (str, list))
    return f"{texts[0]} is text, but {lists[0]} is a conversation" if texts and lists else ""


def _why_no_conversation(column: str, messages: Any, template: str | None) -> str:
    """Returns why TRL cannot read a conversation (``trl/data_utils.py: is_conversational_from_value``, which looks at
    the first message of a column ``conversations``, and at no other column)."""
    if not isinstance(messages, list):
        return f"{column} is {_shown(messages)}, not a list of messages"
    if not messages:
        return f"{column} has no messages"
    names = {"role": "content", "from": "value"}
    said_by = "from" if column == "conversations" else "role"
    for number, message in enumerate(messages, 1):
        place = f"message {number} of {column}"
        if not isinstance(message, dict):
            return f"{place} is {_shown(message)}, not an object with {said_by} and {names[said_by]}"
        if not isinstance(message.get(said_by), str):
            (other,) = names.keys() - {said_by}
            column_of = {"from": "conversations", "role": "messages"}[other]
            cure = f", but {other}: rename {column} to {column_of}" if isinstance(message.get(other), str) else ""
            return f"{place} has no {said_by}{cure}"
        said = names[said_by]
        if (content := message.get(said)) is None and not message.get("tool_calls"):
            return f"{place} has no {said}"
        if not isinstance(content, str | list | None):
            # ``datasets/features/features.py: Json`` decodes the texts of a key that also has values of other types.
            mixed = "other messages hold lists or numbers there, so the datasets library reads the text as JSON"
            return f"{place} has the {said} {_shown(content)}, which is not text (or {mixed})"
        if template is not None and isinstance(content, list) and not _READS_PARTS.search(template):
            return f"{place} has a list of parts as {said}, but the chat template takes text"
        if template is not None and message[said_by] not in template and drops_role(template, message[said_by]):
            return f"{place} has the role {message[said_by]!r}, and the chat template leaves out what it says"
    return ""


@functools.cache
def drops_role(template: str, role: str) -> bool:
    """Returns whether a chat template leaves out the messages of a role, first or later. If it raises for them, the
    count of the rows' tokens says so."""
    from transformers.utils.chat_template_utils import render_jinja_template  # slow

    said, shown = {"role": role, "content": "Where is it?"}, []
    for messages in ([said], [{"role": "user", "content": "Find it."}, said]):
        with contextlib.suppress(Exception):
            (text,), _ = render_jinja_template([messages], chat_template=template)
            shown.append(said["content"] in text)
    return not any(shown) and shown != []


_READS_PARTS = re.compile(r"""\.text\b|['"]text['"]""")
"""What stands in a chat template that reads contents in parts: {"type": "text", "text": "..."}."""


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def bad_rows(name: str, bad: Mapping[int, str], looked_at: str = "") -> DatasetFormatError:
    """Returns the error for rows of the wrong values. ``bad``: a row's number, counted from 0 -> what is wrong.
    ``looked_at``: the rows that were looked at, if not all."""
    row = min(bad)
    others = f", and {len(bad) - 1} more such row{'s' if len(bad) > 2 else ''}{looked_at}" if len(bad) > 1 else ""
    place = row_place(name, row)
    return DatasetFormatError(f"{name} cannot be trained on: in {place}, {bad[row]}{others}.", hint=_GOOD_VALUES)


def is_empty(row: Mapping[str, Any]) -> bool:
    """Returns whether a row's text, one of its answers, or a prompt that stands alone is empty.

    >>> is_empty({"prompt": "", "completion": "4"}), is_empty({"messages": [{"role": "assistant", "content": ""}]})
    (False, True)
    """
    answers = [value for column, value in row.items() if column != "prompt"] or [*row.values()]
    last = (value[-1] if isinstance(value, list) and value else value for value in answers)
    said = (each.get("content", each.get("value")) if isinstance(each, dict) else each for each in last)
    return "" in [each for each in said if isinstance(each, str)]


def check_first_rows(method: str, name: str, text_column: str) -> Mapping[str, Any]:
    """Checks what the first rows of a JSON or CSV file show, in 20 ms; the datasets library takes seconds to check all.
    Returns the first row of a JSON file; {} for other files, and if it is too long to be read.
    Raises MalformedDatasetError for a file that it would not read, and DatasetFormatError for columns and values."""
    path = pathlib.Path(name)
    if not path.is_file() or DATA_KINDS.get(suffix_of(path)) not in _HEADED:
        return {}
    head = read_head(path)
    if not head.names:
        return {}
    if columns := columns_read(method, head.names, text_column):
        values = ({column: row.get(column) for column in columns} for row in head.rows)
        if bad := {number: why for number, row in enumerate(values) if (why := why_bad(row))}:
            raise bad_rows(name, bad, "" if head.is_whole else f" of the first {len(head.rows)}")
        return head.rows[0] if head.rows else {}
    if head.separator != ",":
        raise MalformedDatasetError(
            f"{name} separates its columns by {head.separator!r}, and TRL's scripts read only commas.",
            hint=f'Convert it: python -c "import pandas; pandas.read_csv({name!r}, sep={head.separator!r})'
            ".to_json('rows.jsonl', orient='records', lines=True, force_ascii=False)\"",
        )
    is_object = len(head.rows) == 1 and suffix_of(path) == ".json"
    lists = [key for key, value in head.rows[0].items() if value and isinstance(value, list)] if is_object else []
    if lists:
        convert = f"print(*map(json.dumps, json.load(open({name!r}))[{lists[0]!r}]), sep='\\n')"
        raise MalformedDatasetError(
            f"{name} is one object, with rows in {' and '.join(map(repr, lists))}: TRL's scripts read a list of rows.",
            hint=f'Convert it: python -c "import json; {convert}" > rows.jsonl',
        )
    raise wrong_format(method, head.names, name, text_column)
