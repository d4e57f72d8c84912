"""Describes what a step of a run does, independently of the number of layers, and writes the events of a whole run."""

from array import array
from bisect import bisect_left
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autotrain_mem.types import CACHE_EMPTIED, Block, EngineMark, Phase, StreamUse


class UnclearError(Exception):
    """Signals that the two runs do not determine the whole run."""


Picks = Mapping[int, "Pick"]
"""The picks of each free and use in a run, by step."""


@dataclass(frozen=True, slots=True)
class Pick:
    """Names one of the live blocks born at a place, by its index from one or both ends."""

    place: Hashable
    from_oldest: int | None
    from_newest: int | None

    def of(self, living: Sequence[int]) -> int:
        """Returns the index of the picked block. Raises UnclearError if there is none, or if both indices disagree."""
        count = len(living)
        index = self.from_oldest if self.from_oldest is not None else count - 1 - (self.from_newest or 0)
        if not 0 <= index < count or (self.from_newest is not None and count - 1 - self.from_newest != index):
            raise UnclearError
        return index


def agreed(alternatives: Iterable[Sequence[Pick]]) -> Pick:
    """Returns the pick of the first alternative in which all picks agree. Raises UnclearError if they agree in none."""
    for picks in alternatives:
        first = picks[0]
        if any(pick.place != first.place for pick in picks):
            continue
        oldest = first.from_oldest if all(pick.from_oldest == first.from_oldest for pick in picks) else None
        newest = first.from_newest if all(pick.from_newest == first.from_newest for pick in picks) else None
        if oldest is not None or newest is not None:
            return Pick(first.place, oldest, newest)
    raise UnclearError


@dataclass(frozen=True, slots=True)
class Birth:
    """Describes the allocation of a block, whose module moves by ``layer_step`` layers with each copy."""

    places: tuple[Hashable, ...]
    size_bytes: int
    like: Block
    pattern: str
    layer: int | None
    """The layer of its module in the first copy; None if it belongs to no layer."""
    layer_step: int
    """The difference in layers between consecutive copies."""

    def block(self, copy: int) -> Block:
        """Returns the block of one copy, counted from 0."""
        if self.layer is None and self.size_bytes == self.like.size_bytes:
            return self.like
        module = self.like.module if self.layer is None else self.pattern.format(self.layer + self.layer_step * copy)
        return Block(size_bytes=self.size_bytes, owner=self.like.owner, module=module, stream=self.like.stream)


@dataclass(frozen=True, slots=True)
class Use:
    """Describes the use of a block on another stream, or its deallocation if ``stream`` is None."""

    pick: Pick
    stream: int | None


Act = Birth | Use | Phase | EngineMark | int | None
"""The action of one step: a phase and a mark begin, and None empties the cache."""


class Writer:
    """Writes the events of the whole run in order, and tracks the live blocks of the requested places."""

    def __init__(self, asked: Container[Hashable]) -> None:
        self._asked = asked
        self.blocks: list[Block] = []
        self.events: array[int] = array("q")
        self.phase_starts: list[tuple[int, Phase]] = []
        self.marks: list[tuple[int, EngineMark | int]] = []
        self.stream_uses: list[StreamUse] = []
        self._living: dict[Hashable, list[int]] = {}
        """For each place, the numbers of its live blocks, ascending; there may be thousands."""
        self._places: list[list[Hashable]] = []
        """The requested places of each block."""

    def write(self, acts: Sequence[Act], copies: int) -> None:
        """Writes the events of several steps, once for each copy."""
        for copy in range(copies):
            for act in acts:
                if isinstance(act, Use):
                    self._use(act)
                elif isinstance(act, Birth):
                    self._bear(act, copy)
                elif act is None:
                    self.events.append(CACHE_EMPTIED)
                elif isinstance(act, Phase):
                    self.phase_starts.append((len(self.events), act))
                else:
                    self.marks.append((len(self.events), act))

    def _use(self, act: Use) -> None:
        pick = act.pick
        living = self._living.get(pick.place, [])
        index = pick.of(living)
        number = living[index]
        if act.stream is not None:
            self.stream_uses.append(StreamUse(len(self.events), number, act.stream))
            return
        del living[index]
        for place in self._places[number - 1]:
            if place != pick.place:
                there = self._living[place]
                del there[bisect_left(there, number)]
        self.events.append(-number)

    def _bear(self, birth: Birth, copy: int) -> None:
        self.blocks.append(birth.block(copy))
        number = len(self.blocks)
        places = [place for place in birth.places if place in self._asked]
        self._places.append(places)
        for place in places:
            self._living.setdefault(place, []).append(number)
        self.events.append(number)
