"""Finds the label that a line begins with, so that what wraps stands below the text beside it."""

from __future__ import annotations

import re

_LABEL = re.compile(r"(\s*\S.*?\s{2,})(?=\S)|(\s+)")
_WIDTH = 32
"""A label that takes more than two fifths of 80 columns leaves too little for what stands beside it."""


def label_of(line: str) -> str:
    """Returns what stands before two spaces or more, or the line's own indent; empty where there is neither.

    >>> label_of("--plan_only  plans for that card and trains nothing")
    '--plan_only  '
    """
    match = _LABEL.match(line)
    label = match[0] if match is not None else ""
    return label if label and len(label) <= _WIDTH else line[: len(line) - len(line.lstrip())]
