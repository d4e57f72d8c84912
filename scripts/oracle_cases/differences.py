"""Finds where the results of two runs differ."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Any

EQUAL = 1e-12
"""The relative difference that another order of summation may cause; two different float32 differ by at least 6e-8."""
PROSE = ("error", "message", "not_counted", "refused", "remedy", "warnings", "why", "would_fit")
"""Keys that hold sentences."""
_ABSENT = "(absent)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One value that differs between two runs of a case."""

    where: str
    """The path of keys to the value: ``json.attempts.0.knobs.max_length``."""
    old: Json
    new: Json

    def __str__(self) -> str:
        return f"{self.where or 'all of it'}: {_shown(self.old)} -> {_shown(self.new)}"

    @property
    def key(self) -> str:
        """The same path for any entry of a list: ``json.attempts.*.knobs.max_length``."""
        return ".".join("*" if key.isdigit() else key for key in self.where.split("."))


def compare(
    old: Mapping[str, Json], new: Mapping[str, Json], *, without_prose: bool = False
) -> dict[str, list[Difference]]:
    """Returns the differences of each case that differs, in the order of the old cases."""
    names = [*old, *(name for name in new if name not in old)]
    found = {
        name: list(_differences(old.get(name, _ABSENT), new.get(name, _ABSENT), "", without_prose=without_prose))
        for name in names
    }
    return {name: differences for name, differences in found.items() if differences}


def case_lines(found: Mapping[str, Sequence[Difference]]) -> list[str]:
    """Returns a line for each case: how many values differ, and the first of them."""
    return [f"{name}: {len(each)} differ, the first {each[0]}" for name, each in found.items()]


def key_lines(found: Mapping[str, Sequence[Difference]]) -> list[str]:
    """Returns a line for each key: in how many cases its values differ. The most frequent comes first."""
    counts = Counter(key for differences in found.values() for key in {each.key for each in differences})
    return [f"{count:5} cases  {key}" for key, count in counts.most_common()]


def _differences(old: Json, new: Json, where: str, *, without_prose: bool) -> Iterator[Difference]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        pairs = {name: (old.get(name, _ABSENT), new.get(name, _ABSENT)) for name in {**old, **new}}
        compared = {name: pair for name, pair in pairs.items() if not (without_prose and name in PROSE)}
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        compared = {str(index): pair for index, pair in enumerate(zip(old, new, strict=True))}
    elif _is_equal(old, new):
        return
    else:
        yield Difference(where=where, old=old, new=new)
        return
    for name, (one, other) in compared.items():
        yield from _differences(one, other, f"{where}.{name}" if where else name, without_prose=without_prose)


def _is_equal(old: Json, new: Json) -> bool:
    """Compares values: 1 equals 1.0, but True does not equal 1."""
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
