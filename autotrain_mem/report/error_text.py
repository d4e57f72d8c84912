"""Writes errors as text without rich, whose import would double the time to reject a typo."""

import os
import re
import sys
import textwrap
from typing import TextIO

from autotrain_mem.support.errors import AutofitError
from autotrain_mem.support.units import printable

_LABEL = re.compile(r"(\s*\S.*?\s{2,})(?=\S)|(\s+)")
_LABEL_WIDTH = 32
"""The most columns of a label: two fifths of 80, so that enough are left for the text beside it."""


def label_of(line: str) -> str:
    """Returns the text before the first two or more spaces, and these spaces; without any, the line's indent.

    >>> label_of("--plan_only  plans for that card and trains nothing")
    '--plan_only  '
    """
    match = _LABEL.match(line)
    label = match[0] if match is not None else ""
    return label if label and len(label) <= _LABEL_WIDTH else line[: len(line) - len(line.lstrip())]


_TITLE = "error: "
_RED, _PLAIN = "\x1b[1;31m", "\x1b[0m"


def print_error(error: AutofitError, stream: TextIO) -> None:
    """Prints an error, wrapped and with a red title on a terminal; elsewhere unwrapped, for searching logs."""
    if not stream.isatty():
        stream.write(error_text(error))
        return
    import shutil

    text = error_text(error, shutil.get_terminal_size().columns)
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    if not is_plain and sys.platform != "win32":  # old Windows consoles print the codes
        text = f"{_RED}{_TITLE}{_PLAIN}{text.removeprefix(_TITLE)}"
    stream.write(text)


def error_text(error: AutofitError, columns: int | None = None) -> str:
    """Writes the message after ``error:`` and the hint indented below, wrapped at ``columns`` if given."""
    first, *rest = printable(error.message or type(error).__name__).splitlines()
    lines = [f"{_TITLE}{first}", *rest, *(f"  {line}" for line in printable(error.hint).splitlines())]
    shown = []
    for line in map(str.rstrip, lines):
        if columns is not None and len(line) > columns:  # wrapped below its text, not below its label
            label = label_of(line)
            width, indent = max(columns, len(label) + 1), " " * len(label)
            text = line[len(label) :]
            line = textwrap.fill(text, width, initial_indent=label, subsequent_indent=indent, break_on_hyphens=False)
        shown.append(f"{line}\n")
    return "".join(shown)
