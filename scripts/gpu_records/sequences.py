"""Two sequences of allocations, side by side: where one has what the other has not, and in which module.

Sizes are compared, rounded as the allocator rounds them; modules only say where. The alignment is greedy: where the two
part, the nearest place is taken at which both go on alike for a while. That is linear in the length of sequences that
are nearly alike, where the shortest edit script would be quadratic in their differences.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from autotrain_mem.allocator.blocks import round_size
from autotrain_mem.types import Trace
from gpu_records.history import History

SMALLEST_BYTES = 1 << 20
"""Compared are allocations from here on: of smaller ones there are many, and they move no peak."""
ALIKE = 6
"""Allocations of equal size in a row that count as having met again."""
FARTHEST = 1000
"""Allocations that may lie between two places where sequences meet."""


@dataclass(frozen=True, slots=True)
class Birth:
    size_bytes: int
    """Rounded."""
    label: str
    """``phase module``."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A stretch in which two sequences differ: what only one of them has."""

    place: int
    """Where it begins in the first sequence."""
    first: tuple[Birth, ...]
    second: tuple[Birth, ...]
    is_end: bool = False
    """Whether they never meet again."""


def births_of_trace(trace: Trace, left_out: Collection[str]) -> list[Birth]:
    """What a rehearsal allocated, except in some phases and what is smaller than ``SMALLEST_BYTES``."""
    born = ((phase.value, block) for phase, sign, block in trace.walk() if sign > 0)
    return _large(((block.size_bytes, f"{phase} {block.module}".rstrip()) for phase, block in born), left_out)


def births_of_history(history: History, left_out: Collection[str]) -> list[Birth]:
    """The same of a recorded run."""
    return _large(((event.size_bytes, event.label) for event in history if event.action == "alloc"), left_out)


def _large(allocated: Iterable[tuple[int, str]], left_out: Collection[str]) -> list[Birth]:
    births = (Birth(round_size(size_bytes), label) for size_bytes, label in allocated)
    return [
        birth
        for birth in births
        if birth.size_bytes >= SMALLEST_BYTES and birth.label.partition(" ")[0] not in left_out
    ]


def differences(first: Sequence[Birth], second: Sequence[Birth]) -> list[Difference]:
    """All stretches in which the two differ, in order."""
    ours, theirs = [birth.size_bytes for birth in first], [birth.size_bytes for birth in second]
    found: list[Difference] = []
    here, there = 0, 0
    while here < len(ours) or there < len(theirs):
        if here < len(ours) and there < len(theirs) and ours[here] == theirs[there]:
            here, there = here + 1, there + 1
            continue
        met = _meeting(ours, theirs, here, there)
        after_here, after_there = met or (len(ours), len(theirs))
        stretch = (tuple(first[here:after_here]), tuple(second[there:after_there]))
        found.append(Difference(here, *stretch, is_end=met is None))
        here, there = after_here, after_there
    return found


def _meeting(ours: list[int], theirs: list[int], here: int, there: int) -> tuple[int, int] | None:
    """The nearest places at which both go on alike, or end together."""
    for skipped in range(1, FARTHEST):
        for ahead in range(skipped + 1):
            at, other = here + ahead, there + skipped - ahead
            if at > len(ours) or other > len(theirs):
                continue
            next_ours, next_theirs = ours[at : at + ALIKE], theirs[other : other + ALIKE]
            if next_ours == next_theirs and (next_ours or (at == len(ours) and other == len(theirs))):
                return at, other
    return None


def summary(found: Sequence[Difference], names: tuple[str, str], most: int = 20) -> list[str]:
    """One line for each kind of difference, in the order in which they are first met; layers are counted together."""
    kinds = Counter(_kind(difference, names) for difference in found)
    lines = [f"{count:5} x {text}" for text, count in list(kinds.items())[:most]]
    return [*lines, *([f"... and {len(kinds) - most} kinds more"] if len(kinds) > most else [])]


def _kind(difference: Difference, names: tuple[str, str], most: int = 6) -> str:
    layer, sides = re.compile(r"\.\d+(?=\.|$|\s)"), []  # layers that are alike: model.layers.*.mlp
    for name, births in zip(names, (difference.first, difference.second), strict=True):
        sizes = ", ".join(f"{birth.size_bytes:,} in {layer.sub('.*', birth.label)}" for birth in births[:most])
        more = f" ... {len(births)} in all" if len(births) > most else ""
        sides += [f"only {name}: {sizes}{more}"] if births else []
    return "; ".join(sides) + (" (and they never meet again)" if difference.is_end else "")
