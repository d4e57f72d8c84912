"""Says where the results of two runs differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

Json = Any

EQUAL = 1e-12
"""Shares of a number by which the order of a sum may move it; a float32 that differs at all does so by 6e-8."""
PROSE = ("error", "message", "not_counted", "refused", "remedy", "warnings", "why", "would_fit")
"""Keys that hold sentences."""
_ABSENT = "(absent)"


def compare(old: Mapping[str, Json], new: Mapping[str, Json], *, without_prose: bool = False) -> list[str]:
    """A line for each case that differs: its name, how many values do, and the first of them."""
    lines: list[str] = []
    for name in [*old, *(name for name in new if name not in old)]:
        found = list(_differences(old.get(name, _ABSENT), new.get(name, _ABSENT), "", without_prose=without_prose))
        if found:
            lines.append(f"{name}: {len(found)} differ, the first {found[0]}")
    return lines


def _differences(old: Json, new: Json, where: str, *, without_prose: bool) -> Iterator[str]:
    """``"json.knobs.max_length: 512 -> 1024"`` for each value that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        pairs = {name: (old.get(name, _ABSENT), new.get(name, _ABSENT)) for name in {**old, **new}}
        compared = {name: pair for name, pair in pairs.items() if not (without_prose and name in PROSE)}
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        compared = {str(index): pair for index, pair in enumerate(zip(old, new, strict=True))}
    elif _is_equal(old, new):
        return
    else:
        yield f"{where or 'all of it'}: {_shown(old)} -> {_shown(new)}"
        return
    for name, (one, other) in compared.items():
        yield from _differences(one, other, f"{where}.{name}" if where else name, without_prose=without_prose)


def _is_equal(old: Json, new: Json) -> bool:
    """1 is 1.0 here, and True is not 1."""
    if isinstance(old, bool) or isinstance(new, bool):
        return old is new
    if isinstance(old, int | float) and isinstance(new, int | float):
        return old == new or math.isclose(old, new, rel_tol=EQUAL)
    return bool(old == new)


def _shown(value: Json) -> str:
    if isinstance(value, Mapping | list):
        return f"{len(value)} {'keys' if isinstance(value, Mapping) else 'entries'}"
    text = str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
