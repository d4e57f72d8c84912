"""Text that comes from a file, a name or another process, as it may be shown: nothing in it steers what shows it."""

from __future__ import annotations

_LAYOUT = "\n\t"


def printable(text: str) -> str:
    r"""Spells out control characters, invisible ones and those that turn the direction of writing.

    >>> print(printable("a\x1b[2Jb\u202ec"))
    a\x1b[2Jb\u202ec
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in _LAYOUT else _spelled_out(each) for each in text)


def one_line(text: str) -> str:
    """The same without line breaks, one of which would end a comment."""
    return printable(" ".join(text.split()))


def _spelled_out(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
