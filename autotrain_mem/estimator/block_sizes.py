"""Tells how large each block of a rehearsal is where rows have another length."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from autotrain_mem.estimator.depth.alignment import name_of
from autotrain_mem.types import Block, Trace

SMALLEST_BYTES = 512
"""What CUDA's allocator makes of any size (``c10/core/AllocatorConfig.h: kMinBlockSize``)."""
NEAR = 0.005
"""Share by which a size may miss what its tokens say: one token of a row less, such as of shifted labels."""
LEAST_POWER = 1.2
"""From here on a size is taken to grow faster than the tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """A rehearsal, and the tokens of the rows that it had."""

    tokens: int
    trace: Trace


class BlockSizes:
    """Knows the sizes of a rehearsal's blocks at any length, by another rehearsal of the same with another length.

    A block of ``s`` bytes in rows of ``a`` tokens that has ``t`` bytes in rows of ``b`` is the same whatever the length
    (``s == t``), goes with the tokens along a straight line through both points, or, where it grows faster than they
    do, by a power of them, as a mask does by their square. Blocks are the same where the same module made them for the
    same owner; layers are not told apart.

    Example: 8 rows of 1,024 tokens and of 320, in bfloat16: hidden states of 14 and 4.375 MiB are 7 MiB at 512 tokens,
    a mask of 16 and 1.5625 MiB is 4 MiB.
    """

    def __init__(self, here: Rehearsed, other: Rehearsed) -> None:
        self._here, self._other = here, other
        mine, others = _by_place(here.trace), _by_place(other.trace)
        ratio = other.tokens / here.tokens
        numbers: dict[tuple[Hashable, int], int] = {}
        self._pairs: list[tuple[int, int]] = []
        for place, sizes in mine.items():
            for size, partner in _partners(sizes, others.get(place, Counter()), ratio).items():
                numbers[place, size] = len(self._pairs)
                self._pairs.append((size, partner))
        self._numbers = [numbers[_place(block), block.size_bytes] for block in here.trace.blocks]

    def at(self, tokens: int) -> list[int]:
        """Returns the size of every block, in bytes, in rows of so many tokens."""
        a, b = self._here.tokens, self._other.tokens
        sizes = [_size_at(tokens, a, size, b, partner) for size, partner in self._pairs]
        return [sizes[number] for number in self._numbers]


def _place(block: Block) -> Hashable:
    return block.owner, name_of(block.module).pattern, block.stream


def _by_place(trace: Trace) -> dict[Hashable, Counter[int]]:
    places: dict[Hashable, Counter[int]] = defaultdict(Counter)
    for block in trace.blocks:
        places[_place(block)][block.size_bytes] += 1
    return places


def _partners(mine: Counter[int], others: Counter[int], ratio: float) -> dict[int, int]:
    """Finds for each size at a place the one that the same blocks have in the other rehearsal.

    Of those that would be plain (the same, as much more as there are tokens, as their square) it is the one of which
    there are as many blocks; what is left is in the same order, or else goes with the tokens.
    """
    partners: dict[int, int] = {}
    for size, count in mine.items():
        near = [_nearest(others, size * ratio**power) for power in (0, 1, 2)]
        plain = [each for each in near if each is not None]
        if plain:
            partners[size] = min(plain, key=lambda each: abs(others[each] - count))
    left = sorted(mine.keys() - partners.keys())
    right = sorted(others.keys() - {*partners.values()})
    if len(left) == len(right):
        return partners | dict(zip(left, right, strict=True))
    return partners | {size: round(size * ratio) for size in left}


def _nearest(sizes: Counter[int], wanted: float) -> int | None:
    """Finds a size that is the wanted one but for :data:`NEAR`; None where there is none."""
    nearest = min(sizes, key=lambda each: abs(each - wanted), default=None)
    return nearest if nearest is not None and abs(nearest - wanted) <= NEAR * wanted else None


def _size_at(tokens: int, a: int, size: int, b: int, partner: int) -> int:
    if size == partner or a == b or not size or not partner:
        return size
    power = math.log(partner / size) / math.log(b / a)
    if power > LEAST_POWER:
        return max(SMALLEST_BYTES, round(size * math.pow(tokens / a, power)))
    return max(SMALLEST_BYTES, round(size + (partner - size) * (tokens - a) / (b - a)))
