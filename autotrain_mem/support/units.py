"""Bytes, and the one place where they are read and written as text.

Every size in this project is an ``int`` of bytes whose name ends in ``_bytes``. Binary units only: GiB is 2**30 bytes.
"""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {"b": 1, "kib": KIB, "mib": MIB, "gib": GIB}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(b|kib|mib|gib)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Read a size such as ``"12GiB"``, ``"0.5 GiB"`` or ``"300MiB"``.

    Raises:
        ValueError: the text is not a number followed by B, KiB, MiB or GiB. Units of 1000 (GB) are refused, since
            the two readings of "24 GB" differ by 1.6 GiB.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size: write a number and B, KiB, MiB or GiB, for example 12GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(size_bytes: int) -> str:
    """Write a size in the largest unit that keeps it at 1 or more: ``format_bytes(25_281_000_000) == "23.5 GiB"``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= unit:
            value = size_bytes / unit
            return f"{value:.2f} {name}" if value < 10 else f"{value:.1f} {name}"
    return f"{size_bytes} B"
