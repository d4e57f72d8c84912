"""Gathers what was rehearsed of a line of points, and of the lines that are like it but for what saves bytes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autotrain_mem.search.memo import Line, Memo
from autotrain_mem.search.shardings import SAVES
from autotrain_mem.settings.knobs import BASE_BITS
from autotrain_mem.settings.levers import EIGHT_BIT, LEVERS, NESTED_QUANT, SLOWING
from autotrain_mem.types import Estimate, Knobs

HALF_BITS = 16
"""Of a weight of a base that is not quantized: half precision, or more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """A line, and what was rehearsed of it and of those that differ from it in levers that save bytes alone.

    Example: of the line with recomputation, ``gentler`` is what is known of the same setting without, and ``harder``
    what is known of it with activations offloaded too.
    """

    line: Line
    known: Sequence[Estimate]
    gentler: Sequence[Sequence[Estimate]]
    """What is known of each line with fewer such levers, which needs more and is faster; and of each that has no more
    of them and shares the model among processes in another way. What is most like this line comes last."""
    harder: Sequence[Sequence[Estimate]]
    """The same of each line with more of them, which needs less."""
    shared_harder: Sequence[Sequence[Estimate]]
    """The same of each line with more of them that shares the model in another way."""
    heavier: Sequence[Sequence[Estimate]]
    """What is known of each line with the same adapter on a base of more bits, which needs no less beside it."""


def sights(memo: Memo, lines: Sequence[Line], among: Sequence[Line]) -> list[Sight]:
    """Returns what is known for each of the lines, from these and from all others that were looked at."""
    rehearsed = [(other[0], known) for other in among if (known := memo.known(other))]
    return [
        Sight(
            line=line,
            known=memo.known(line),
            gentler=_likest_last(line[0], [(other, known) for other, known in rehearsed if _is_akin(other, line[0])]),
            harder=[known for other, known in rehearsed if _is_below(line[0], other)],
            shared_harder=[
                known for other, known in rehearsed if _is_akin(line[0], other) and not _is_akin(other, line[0])
            ],
            heavier=[known for other, known in rehearsed if _is_heavier(other, line[0])],
        )
        for line in lines
    ]


def _likest_last(line: Knobs, akin: list[tuple[Knobs, list[Estimate]]]) -> list[list[Estimate]]:
    def likeness(pair: tuple[Knobs, list[Estimate]]) -> tuple[bool, int]:
        return shares_alike(pair[0], line), len(saving_levers(pair[0]))

    return [known for _, known in sorted(akin, key=likeness)]


@lru_cache(maxsize=65536)  # pairs of lines, each of which is compared again in every turn of a search
def _is_below(one: Knobs, other: Knobs) -> bool:
    """Whether two lines differ in levers that save bytes alone, of which the first has fewer, and no smaller shards."""
    shards = SAVES.get(one.sharding, frozenset()), SAVES.get(other.sharding, frozenset())
    levers = saving_levers(one), saving_levers(other)
    return levers[0] <= levers[1] and shards[0] <= shards[1] and _differs(one, other)


@lru_cache(maxsize=65536)
def _is_akin(one: Knobs, other: Knobs) -> bool:
    """Whether two lines differ in levers that save bytes alone, of which the first has fewer, or in sharding.

    What shards leave of a device and cost of time is computed both ways.
    """
    return saving_levers(one) <= saving_levers(other) and _differs(one, other)


@lru_cache(maxsize=65536)
def _is_heavier(one: Knobs, other: Knobs) -> bool:
    """Whether two lines differ in the base of an adapter alone, of which the first has more bits a weight."""
    if not one.use_peft or other.base_bits is None or (one.base_bits or HALF_BITS) <= other.base_bits:
        return False
    return replace(one, **{name: getattr(other, name) for name in ("dtype", *BASE_BITS, NESTED_QUANT)}) == other


def _differs(one: Knobs, other: Knobs) -> bool:
    """In such levers or in sharding, and in nothing else."""
    is_other = saving_levers(one) != saving_levers(other) or not shares_alike(one, other)
    return is_other and _otherwise(one) == _otherwise(other)


def shares_alike(one: Knobs, other: Knobs) -> bool:
    """Whether two points share the model among processes in the same way."""
    return one.sharding == other.sharding


def _otherwise(knobs: Knobs) -> tuple[object, ...]:
    row = LEVERS[EIGHT_BIT]
    optim = row.to if knobs.optim in row.moves_from else knobs.optim
    return optim, knobs.use_peft, knobs.lora_r, knobs.dtype, knobs.base_bits, knobs.use_bnb_nested_quant


def saving_levers(knobs: Knobs) -> frozenset[str]:
    """The levers of a point that take bytes away and make no step faster."""
    rounded = {EIGHT_BIT} if knobs.optim == LEVERS[EIGHT_BIT].to else set()
    return frozenset(name for name in SLOWING if getattr(knobs, name)) | rounded
