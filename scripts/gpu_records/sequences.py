"""Compares two sequences of allocations, and shows where they differ and in which modules.

Only sizes are compared, rounded as the allocator rounds them; modules are just shown. The alignment is greedy: after a
difference it continues at the nearest place from which both sequences are equal for a while. For nearly equal sequences
the time is linear in their length; a shortest edit script would be quadratic in their differences.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from autotrain_mem.allocator.blocks import round_size
from autotrain_mem.types import Trace
from gpu_records.history import History

SMALLEST_BYTES = 1 << 20
"""Smaller allocations are not compared: there are many of them, and they do not affect the peak."""
ALIKE = 6
"""After so many consecutive allocations of equal size, two sequences count as aligned again."""
FARTHEST = 1000
"""The alignment gives up after about so many skipped allocations in both sequences together."""


@dataclass(frozen=True, slots=True)
class Birth:
    size_bytes: int
    """Rounded as by the allocator."""
    label: str
    """``phase module``."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A stretch in which two sequences differ, with the allocations of each."""

    place: int
    """The index in the first sequence where it begins."""
    first: tuple[Birth, ...]
    second: tuple[Birth, ...]
    is_end: bool = False
    """Whether the sequences are never aligned again."""


def births_of_trace(trace: Trace, left_out: Collection[str]) -> list[Birth]:
    """Returns a rehearsal's allocations of at least ``SMALLEST_BYTES``, without those of the phases ``left_out``."""
    born = ((phase.value, block) for phase, sign, block in trace.walk() if sign > 0)
    return _large(((block.size_bytes, f"{phase} {block.module}".rstrip()) for phase, block in born), left_out)


def births_of_history(history: History, left_out: Collection[str]) -> list[Birth]:
    """Returns the same for a recorded run."""
    return _large(((event.size_bytes, event.label) for event in history if event.action == "alloc"), left_out)


def _large(allocated: Iterable[tuple[int, str]], left_out: Collection[str]) -> list[Birth]:
    births = (Birth(round_size(size_bytes), label) for size_bytes, label in allocated)
    return [
        birth
        for birth in births
        if birth.size_bytes >= SMALLEST_BYTES and birth.label.partition(" ")[0] not in left_out
    ]


def differences(first: Sequence[Birth], second: Sequence[Birth]) -> list[Difference]:
    """Returns all stretches in which the sequences differ, in order."""
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
    """Returns the nearest pair of indices from which both are equal for ``ALIKE`` allocations or to their ends."""
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
    """Returns a line for each kind of difference, in order of first occurrence; equal layers are counted together."""
    kinds = Counter(_kind(difference, names) for difference in found)
    lines = [f"{count:5} x {text}" for text, count in list(kinds.items())[:most]]
    return [*lines, *([f"... and {len(kinds) - most} kinds more"] if len(kinds) > most else [])]


def _kind(difference: Difference, names: tuple[str, str], most: int = 6) -> str:
    layer, sides = re.compile(r"\.\d+(?=\.|$|\s)"), []  # replaces a layer's number: model.layers.*.mlp
    for name, births in zip(names, (difference.first, difference.second), strict=True):
        sizes = ", ".join(f"{birth.size_bytes:,} in {layer.sub('.*', birth.label)}" for birth in births[:most])
        more = f" ... {len(births)} in all" if len(births) > most else ""
        sides += [f"only {name}: {sizes}{more}"] if births else []
    return "; ".join(sides) + (" (and they are never aligned again)" if difference.is_end else "")
