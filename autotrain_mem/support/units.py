"""Formats bytes, counts, times, rates and money as text, and makes text from other sources safe to print.

Every size in this project is an ``int`` of bytes whose name ends in ``_bytes``. Units are binary: GiB is 2**30 bytes.
"""

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {"b": 1, "kib": KIB, "mib": MIB, "gib": GIB}


def parse_bytes(text: str) -> int:
    """Reads a size such as ``"12GiB"``, ``"0.5 GiB"`` or ``"300MiB"``. Raises ValueError if the text is not a number
    followed by B, KiB, MiB or GiB. Decimal units are rejected: "24 GB" is 1.6 GiB less than 24 GiB."""
    if (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(b|kib|mib|gib)\s*", text, re.IGNORECASE)) is None:
        raise ValueError(f"{text!r} is not a size: write a number and B, KiB, MiB or GiB, for example 12GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(size_bytes: int) -> str:
    """Writes a size in the largest unit that keeps it at 1 or more: ``format_bytes(25_281_000_000) == "23.5 GiB"``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{value:.2f} {name}" if (value := size_bytes / unit) < 10 else f"{value:.1f} {name}"
    return f"{size_bytes} B"


def counted(number: int, noun: str) -> str:
    """Formats a number with its noun: ``1 row``, ``1,200 rows``."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def millions(number: int) -> str:
    """Formats a large number with three digits: ``8.80 M``, ``7.62 B``; ``12,345`` in full."""
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            scaled = number / size
            return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f} {unit}"
    return f"{number:,}"


def duration(seconds: float) -> str:
    """Formats seconds: ``41.3 s``, ``3 min 20 s`` or ``2 h 05 min``."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def amount(cost: float) -> str:
    """Formats a cost with at least two significant digits: ``4.14``, ``0.0031``."""
    return f"{cost:,.2f}" if cost >= 0.1 else f"{cost:.2g}"


def money(cost: float, currency: str) -> str:
    """Formats a cost with its currency: ``4.14 USD``."""
    return f"{amount(cost)} {currency}"


def brief(seconds: float) -> str:
    """Formats seconds as ``duration`` does, but less than one second in milliseconds: ``66 ms``, ``6.6 s``."""
    return f"{1000 * seconds:.0f} ms" if seconds < 0.9995 else duration(seconds)


def rate(tokens_per_second: float) -> str:
    """Formats a speed: ``1,240`` or ``3.2``; predictions are no more precise."""
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.1f}"


def percent(fraction: float) -> str:
    """Formats a share as a percentage with one digit; a share above 0 never becomes 0.0."""
    return "less than 0.1 %" if 0 < fraction < 0.0005 else f"{100 * fraction:.1f} %"


def printable(text: str) -> str:
    r"""Escapes control characters, invisible characters and those that change the writing direction.

    >>> print(printable("a\x1b[2Jb\u202ec"))
    a\x1b[2Jb\u202ec
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode() for each in text
    )


def one_line(text: str) -> str:
    """Escapes like :func:`printable` and removes line breaks, which would end a comment."""
    return printable(" ".join(text.split()))
