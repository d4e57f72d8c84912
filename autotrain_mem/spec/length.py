"""Reads ``max_length`` in the user's words: a number of tokens, or a wish that the data are to answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

AUTO = "auto"
"""Asks for the longest row."""
NO_LIMIT = "none"
MAX_LENGTH = "max_length"

_PERCENTILE = re.compile(r"p(\d+(?:\.\d+)?)")


def read_length(text: str) -> int | str | None:
    """Reads a flag's or a YAML key's value: ``512``, ``"auto"``, ``"p99.9"``, or None for no limit.

    Raises:
        ValueError: anything else; says what is wrong with it.
    """
    said = text.strip().lower()
    if said == NO_LIMIT:
        return None
    if said == AUTO:
        return said
    if match := _PERCENTILE.fullmatch(said):
        if not 0 < float(match[1]) <= 100:
            raise ValueError(f"{text!r} is no percentile of the rows: they go from above p0 to p100")
        return said
    if not said.isdigit() or int(said) < 1:
        raise ValueError(f"{text!r} is neither a number of tokens, nor auto, nor a percentile such as p99.9")
    return int(said)


def is_wish(value: Any) -> bool:
    """Tells whether the data are to say: ``auto`` or a percentile."""
    return isinstance(value, str) and (value == AUTO or _PERCENTILE.fullmatch(value) is not None)


def wished_share(value: Any) -> float:
    """Returns the share of the rows that are to keep all their tokens: 0.999 for ``p99.9``, 1 for ``auto``."""
    match = _PERCENTILE.fullmatch(value) if isinstance(value, str) else None
    return 1.0 if match is None else float(match[1]) / 100


def without_wish(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Keeps the arguments that TRL can be given: it knows no length but a number."""
    return {name: value for name, value in arguments.items() if name != MAX_LENGTH or not is_wish(value)}
