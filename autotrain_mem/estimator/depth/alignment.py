"""Aligns a run of few layers (or chunks of the loss) and a run of a few more, to find the events of one layer.

The longer run is the shorter one with insertions. Wherever work goes layer by layer (a forward pass, its recomputation,
its backward pass, an optimizer's list, loading), the longer run has one more copy for each extra layer; within a
chunked loss, one for each extra chunk. Where the two runs diverge, a copy's length is right if the longer run continues
with equal copies of that length, one for each extra layer or chunk, and both runs match again after them.
"""

import re
from array import array
from collections.abc import Container, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from autotrain_mem.types import CACHE_EMPTIED, Depths, Trace

NOWHERE = -1
"""The value in ``Steps.births`` for a step that concerns no block."""
SURE_STEPS = 64
"""The number of equal steps after which two runs count as matching."""
MOST_LOOKS = 10_000_000
"""Copy lengths to try, over all places, before giving up: about a second. Runs that match take far fewer:
25,000 with SFT of Llama-3.1-8B."""

_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")
"""The first whole number in a module's name: ``model.layers.7.mlp.experts.3`` belongs to layer 7."""


@dataclass(frozen=True, slots=True)
class Name:
    """Splits a module's name into a pattern and its layer: ``model.layers.{}.mlp`` and 7. The layer may be None."""

    pattern: str
    layer: int | None


@lru_cache(maxsize=1 << 16)
def name_of(module: str) -> Name:
    """Parses a module's name."""
    if (match := _LAYER.search(module)) is None:
        return Name(module.replace("{", "{{").replace("}", "}}"), None)
    return Name(f"{module[: match.start()]}{{}}{module[match.end() :]}", int(match.group()))


class Vocabulary(dict[Hashable, int]):
    """Numbers the possible steps: equal ones have the same number in both runs."""

    def __missing__(self, what: Hashable) -> int:
        number = self[what] = len(self)
        return number


@dataclass(frozen=True, slots=True)
class Steps:
    """Holds a run as one sequence: births (allocations), deaths (frees), emptied caches, uses on other streams, phase
    starts and marks. Two steps with the same symbol differ only in their layer."""

    symbols: list[int] = field(default_factory=list)
    sizeless: list[int] = field(default_factory=list)
    """Like ``symbols``, but ignores the size of a block."""
    births: list[int] = field(default_factory=list)
    """The step in which each step's block was born; for a birth, its own index."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each step's block; 0 where there is none."""
    events: list[int] = field(default_factory=list)
    """``+n`` for the birth of block ``n``, as in a trace, and ``-n`` for its death or use; 0 without a block."""
    facts: list[Hashable] = field(default_factory=list)
    """A phase, a mark, or the stream of a use; None for all others."""
    of_loss: list[bool] = field(default_factory=list)
    """Whether each step's block was born in a pass over the chunks of a loss."""

    def add(
        self,
        symbol: int,
        fact: Hashable,
        sizeless: int | None = None,
        birth: int = NOWHERE,
        size: int = 0,
        event: int = 0,
        of_loss: bool = False,
    ) -> None:
        """Adds a step; one without a block has no birth, size or event."""
        self.symbols.append(symbol)
        self.sizeless.append(symbol if sizeless is None else sizeless)
        self.births.append(birth)
        self.sizes.append(size)
        self.events.append(event)
        self.facts.append(fact)
        self.of_loss.append(of_loss)


def steps_of(trace: Trace, vocabulary: Vocabulary) -> Steps:
    """Writes a trace as a sequence of symbols."""
    steps, born = Steps(), [NOWHERE] * len(trace.blocks)
    of_loss = [False] * len(trace.blocks)
    for one in trace.loss_passes:
        for event in trace.events[one.start : one.stop]:
            if event > 0:
                of_loss[event - 1] = True
    sizeless = [
        vocabulary[block.owner, name_of(block.module).pattern, block.stream, of_loss[number]]
        for number, block in enumerate(trace.blocks)
    ]
    sized = [vocabulary[kind, block.size_bytes] for kind, block in zip(sizeless, trace.blocks, strict=True)]
    before: dict[int, list[tuple[Hashable, int | None]]] = {}
    for index, fact in (*trace.phase_starts, *trace.marks):
        before.setdefault(index, []).append((fact, None))
    for use in trace.stream_uses:
        before.setdefault(use.event, []).append((use.stream, use.block - 1))

    def add(what: str, block: int, event: int, fact: Hashable = None) -> None:
        symbol, alike = vocabulary[what, fact, sized[block]], vocabulary[what, fact, sizeless[block]]
        steps.add(symbol, fact, alike, born[block], trace.blocks[block].size_bytes, event, of_loss[block])

    def add_before(index: int) -> None:
        for fact, block in before.get(index, ()):
            if block is None:
                steps.add(vocabulary["mark", fact], fact)
            else:
                add("use", block, -block - 1, fact)

    for index, event in enumerate(in_order(trace)):
        if index in before:
            add_before(index)
        if event > 0:
            born[event - 1] = len(steps.births)
            add("birth", event - 1, event)
        elif event == CACHE_EMPTIED:
            steps.add(vocabulary["cache emptied"], None)
        else:
            add("death", -event - 1, event)
    add_before(len(trace.events))
    return steps


def in_order(trace: Trace) -> "array[int]":
    """Lists the events, with consecutive deaths sorted by birth.

    Nothing depends on the order of these deaths, which can be arbitrary: autocast frees its casts in the order of a
    table of addresses (``at::autocast::clear_cache``).
    """
    events, born = array("q", trace.events), [0] * len(trace.blocks)
    between = {index for index, _ in (*trace.phase_starts, *trace.marks)}
    between |= {use.event for use in trace.stream_uses}
    start = 0
    for index, event in enumerate((*trace.events, CACHE_EMPTIED)):  # one more event, which ends the last run of deaths
        if event >= 0 or index in between:
            if index - start > 1:
                events[start:index] = array("q", sorted(events[start:index], key=lambda death: born[-death - 1]))
            start = index + (event >= 0)
        if event > 0:
            born[event - 1] = index
    return events


@dataclass(frozen=True, slots=True)
class Insertion:
    """Describes copies that only the longer run has."""

    short: int
    """The shorter run's step before which they are inserted."""
    long: int
    """The longer run's step at which the first copy begins."""
    period: int
    """Steps of one copy."""
    growth: Depths
    """The numbers of layers, or of chunks if the copies are chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """Describes how the longer run follows from the shorter one."""

    insertions: tuple[Insertion, ...]
    resized: tuple[int, ...]
    """Births of the shorter run whose blocks have another size in the longer run."""


class Search:
    """Finds the insertions: follows both runs, and backtracks to the last choice when they stop matching.

    Args:
        layers: Numbers of layers in both runs, and in the whole model.
        chunks: Numbers of chunks of the loss; None if both runs have equally many.
        unlike: Pairs of steps that look the same and are known to differ.
    """

    def __init__(
        self, short: Steps, long: Steps, layers: Depths, chunks: Depths | None, unlike: Container[tuple[int, int]]
    ) -> None:
        self._short, self._long, self._unlike = short, long, unlike
        self._layers, self._chunks = layers, chunks or layers
        self._trail: list[Insertion | int] = []
        """Insertions, and births of the shorter run whose blocks have another size in the longer run."""
        self._looks = 0
        self._partner: dict[int, int] = {}
        """Maps the birth of a resized block in the shorter run to its birth in the longer run."""

    def alignment(self) -> Alignment | None:
        """Returns the first alignment that reaches the end of both runs; None if there is none."""
        here = self._along(0, 0)
        choices: list[tuple[int, Iterator[tuple[int, int]]]] = []
        tried: set[tuple[int, int]] = set()
        ends = (len(self._short.symbols), len(self._long.symbols))
        while here != ends:
            if here not in tried and self._looks < MOST_LOOKS:
                tried.add(here)
                choices.append((len(self._trail), self._ways(*here)))
            step = None
            while choices and step is None:
                length, ways = choices[-1]
                del self._trail[length:]
                if (step := next(ways, None)) is None:
                    choices.pop()
            if step is None:
                return None
            here = self._along(*step)
        return Alignment(
            insertions=tuple(one for one in self._trail if isinstance(one, Insertion)),
            resized=tuple(one for one in self._trail if isinstance(one, int)),
        )

    def _along(self, i: int, j: int) -> tuple[int, int]:
        """Returns where the two runs diverge, starting from these steps."""
        short, long = self._short.symbols, self._long.symbols
        end = min(len(short) - i, len(long) - j)
        at = 0
        while at < end and (short[i + at] == long[j + at] or self._is_of_partner(i + at, j + at)):
            if (i + at, j + at) in self._unlike:
                break
            at += 1
        return i + at, j + at

    def _is_of_partner(self, i: int, j: int, more: Mapping[int, int] = MappingProxyType({})) -> bool:
        """Returns whether both steps concern the same block, which has another size in the longer run."""
        born = self._short.births[i]
        return (
            born not in (NOWHERE, i)
            and more.get(born, self._partner.get(born)) == self._long.births[j]
            and self._short.sizeless[i] == self._long.sizeless[j]
        )

    def _ways(self, i: int, j: int) -> Iterator[tuple[int, int]]:
        """Returns the ways to continue from here, the most likely first."""
        of_loss = self._long.of_loss
        growth = self._chunks if j < len(of_loss) and of_loss[j] else self._layers
        for period in self._periods(i, j, growth.copies):
            self._trail.append(Insertion(i, j, period, growth))
            yield i, j + period * growth.copies
        if self._may_be_resized(i, j):
            self._trail.append(i)
            self._partner[i] = j
            yield i + 1, j + 1
            del self._partner[i]

    def _may_be_resized(self, i: int, j: int) -> bool:
        """Returns whether two births may be of one block that grows evenly with the layers. No block grows with the
        chunks, since a loss passes on only scalars and gradients of its inputs."""
        short, long = self._short, self._long
        if i >= len(short.symbols) or j >= len(long.symbols) or short.sizeless[i] != long.sizeless[j]:
            return False
        more = long.sizes[j] - short.sizes[i]
        are_births = short.births[i] == i and long.births[j] == j and not long.of_loss[j]
        return are_births and more > 0 and more % self._layers.copies == 0

    def _periods(self, i: int, j: int, copies: int) -> list[int]:
        """Lists the copy lengths after which the runs match again, those that match longest first."""
        long = self._long.symbols
        more = (len(long) - j) - (len(self._short.symbols) - i)
        self._looks += max(more, 0) // copies
        lengths = []
        most, at = more // copies, j
        while most > 0:
            try:
                at = long.index(long[j], at + 1, j + most + 1)  # a loop in Python takes ten times as long
            except ValueError:
                break
            period = at - j
            stop = j + period * copies
            if long[j : stop - period] == long[j + period : stop] and (alike := self._alike(i, stop)):
                lengths.append((-alike, period))
        return [period for _, period in sorted(lengths)]

    def _alike(self, i: int, j: int) -> int:
        """Counts the steps for which the runs match; :data:`SURE_STEPS` if that many do, or both runs end."""
        short, long = self._short, self._long
        end = min(SURE_STEPS, len(short.symbols) - i, len(long.symbols) - j)
        resized: dict[int, int] = {}
        for at in range(end):
            one, other = i + at, j + at
            if (one, other) in self._unlike:
                return at
            if short.symbols[one] == long.symbols[other]:
                continue
            if self._may_be_resized(one, other):
                resized[one] = other
            elif not self._is_of_partner(one, other, resized):
                return at
        both_end = i + end == len(short.symbols) and j + end == len(long.symbols)
        return SURE_STEPS if both_end else end
