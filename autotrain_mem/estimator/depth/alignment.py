"""Which stretches of a run belong to one layer: two runs of one model, of few layers and of a few more, side by side.

The longer run is the shorter one with stretches inserted: at each place that does something layer by layer (a forward
pass, its recomputation, its backward pass, a list of the optimizer, loading) stand as many equal copies as there are
layers more. Where the two runs part, the length of a copy is what makes the next stretch of the longer run so many
equal copies, behind which both go on alike.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Container, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from autotrain_mem.spec import Block, Trace
from autotrain_mem.spec.trace import CACHE_EMPTIED

NOWHERE = -1
"""The birth that belongs to a step which concerns no block."""
SURE_STEPS = 64
"""Two runs that go on alike for so many steps are taken to go on alike for longer."""
MOST_LOOKS = 1_000_000
"""Lengths of a copy that are tried, over all places, before two runs are given up: under a second. Runs that agree take
25,000 (SFT of Llama-3.1-8B) to 130,000 (GRPO with 12 tokens to sample)."""

_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")
"""The first whole number in a module's name: ``model.layers.7.mlp.experts.3`` belongs to layer 7."""


@dataclass(frozen=True, slots=True)
class Name:
    """A module's name without the number of its layer: ``model.layers.{}.mlp`` and 7; None where it has no number."""

    pattern: str
    layer: int | None

    @classmethod
    def of(cls, module: str) -> Name:
        found = _LAYER.search(module)
        if found is None:
            return cls(module.replace("{", "{{").replace("}", "}}"), None)
        return cls(f"{module[: found.start()]}{{}}{module[found.end() :]}", int(found.group()))


class Vocabulary:
    """Numbers for what may happen in a step, the same for both runs."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._names: dict[str, Name] = {}

    def number(self, what: Hashable) -> int:
        """Equal things have one number."""
        return self._numbers.setdefault(what, len(self._numbers))

    def name(self, module: str) -> Name:
        """A module's name, looked into once."""
        found = self._names.get(module)
        if found is None:
            found = self._names[module] = Name.of(module)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """A run as one sequence: births, deaths, emptied caches, uses on other streams and the starts of phases.

    Two steps with the same symbol are alike but for the layer in which they happen.
    """

    symbols: list[int] = field(default_factory=list)
    sizeless: list[int] = field(default_factory=list)
    """As ``symbols``, but blind to how large a block is."""
    births: list[int] = field(default_factory=list)
    """The step in which the block was born that a step concerns; its own position for a birth."""
    sizes: list[int] = field(default_factory=list)
    """In bytes, of the block that a step concerns; 0 where there is none."""
    events: list[int] = field(default_factory=list)
    """``+n`` and ``-n`` as in a trace, also ``-n`` for a use; 0 for the rest."""
    facts: list[Hashable] = field(default_factory=list)
    """A phase, the stream of a use; None for the rest."""


def steps_of(trace: Trace, vocabulary: Vocabulary) -> Steps:
    """A trace as a sequence of symbols."""
    steps, born = Steps(), [NOWHERE] * len(trace.blocks)
    sized, sizeless = _symbols(trace.blocks, vocabulary)
    between = _between(trace)

    def add(what: str, block: int, event: int, fact: Hashable = None) -> None:
        steps.births.append(born[block])
        steps.symbols.append(vocabulary.number((what, fact, sized[block])))
        steps.sizeless.append(vocabulary.number((what, fact, sizeless[block])))
        steps.sizes.append(trace.blocks[block].size_bytes)
        steps.events.append(event)
        steps.facts.append(fact)

    def add_between(index: int) -> None:
        for what, block, fact in between.get(index, ()):
            if block is None:
                _add_bare(steps, vocabulary.number((what, fact)), fact)
            else:
                add(what, block, -block - 1, fact)

    for index, event in enumerate(_in_order(trace, between)):
        if index in between:
            add_between(index)
        if event > 0:
            born[event - 1] = len(steps.births)
            add("birth", event - 1, event)
        elif event == CACHE_EMPTIED:
            _add_bare(steps, vocabulary.number("cache emptied"), None)
        else:
            add("death", -event - 1, event)
    add_between(len(trace.events))
    return steps


def in_order(trace: Trace) -> array[int]:
    """The events, where several blocks die in a row the oldest first: nothing depends on the order among them.

    It is anyone's guess with some: autocast forgets its casts in the order of a table of addresses
    (``at::autocast::clear_cache``).
    """
    return _in_order(trace, _between(trace))


def _in_order(trace: Trace, between: Container[int]) -> array[int]:
    events, born = array("q", trace.events), [0] * len(trace.blocks)
    start = 0
    for index, event in enumerate(trace.events):
        if event >= 0 or index in between:
            if index - start > 1:
                events[start:index] = _by_birth(events[start:index], born)
            start = index + (event >= 0)
        if event > 0:
            born[event - 1] = index
    events[start:] = _by_birth(events[start:], born)
    return events


def _by_birth(deaths: array[int], born: list[int]) -> array[int]:
    return array("q", sorted(deaths, key=lambda event: born[-event - 1]))


def _add_bare(steps: Steps, symbol: int, fact: Hashable) -> None:
    steps.symbols.append(symbol)
    steps.sizeless.append(symbol)
    steps.births.append(NOWHERE)
    steps.sizes.append(0)
    steps.events.append(0)
    steps.facts.append(fact)


def _symbols(blocks: tuple[Block, ...], vocabulary: Vocabulary) -> tuple[list[int], list[int]]:
    """Numbers each block, with its size and without."""
    sizeless = [
        vocabulary.number((block.owner, vocabulary.name(block.module).pattern, block.stream)) for block in blocks
    ]
    sized = [vocabulary.number((symbol, block.size_bytes)) for symbol, block in zip(sizeless, blocks, strict=True)]
    return sized, sizeless


def _between(trace: Trace) -> dict[int, list[tuple[str, int | None, Hashable]]]:
    """Lists what happens before the event of an index: phases begin, blocks are used on other streams."""
    found: dict[int, list[tuple[str, int | None, Hashable]]] = {}
    for index, phase in trace.phase_starts:
        found.setdefault(index, []).append(("phase", None, phase))
    for use in trace.stream_uses:
        found.setdefault(use.event, []).append(("use", use.block - 1, use.stream))
    return found


# -- side by side ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Insertion:
    """Copies that the longer run has and the shorter has not."""

    short: int
    """The shorter run's step before which they stand."""
    long: int
    """The longer run's step with which the first copy begins."""
    period: int
    """Steps of one copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """Holds how the longer run is made of the shorter one."""

    insertions: tuple[Insertion, ...]
    resized: tuple[int, ...]
    """The shorter run's births whose blocks are of another size in the longer run."""


def align(short: Steps, long: Steps, copies: int, unlike: Container[tuple[int, int]] = frozenset()) -> Alignment | None:
    """Find what was inserted; None where the longer run is not the shorter one with ``copies`` equal copies at places.

    Args:
        copies: Layers that the longer run has more.
        unlike: Steps of the one and the other that are known not to be the same, though they seem to be.
    """
    return _Search(short, long, copies, unlike).found()


class _Search:
    """Goes along both runs, and back to the last place where there was a choice when they do not meet again."""

    def __init__(self, short: Steps, long: Steps, copies: int, unlike: Container[tuple[int, int]]) -> None:
        self._short, self._long, self._copies, self._unlike = short, long, copies, unlike
        self._trail: list[Insertion | int] = []
        """Insertions, and the shorter run's births of another size."""
        self._looks = 0
        self._partner: dict[int, int] = {}
        """The longer run's birth for each of the shorter run's births of another size."""

    def found(self) -> Alignment | None:
        """The first way that goes to the end of both."""
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
                step = next(ways, None)
                if step is None:
                    choices.pop()
            if step is None:
                return None
            here = self._along(*step)
        return Alignment(
            insertions=tuple(one for one in self._trail if isinstance(one, Insertion)),
            resized=tuple(one for one in self._trail if isinstance(one, int)),
        )

    def _along(self, i: int, j: int) -> tuple[int, int]:
        """Finds where the two runs part, from two places on."""
        short, long = self._short.symbols, self._long.symbols
        end = min(len(short) - i, len(long) - j)
        at = 0
        while at < end and (short[i + at] == long[j + at] or self._is_of_partner(i + at, j + at)):
            if (i + at, j + at) in self._unlike:
                break
            at += 1
        return i + at, j + at

    def _is_of_partner(self, i: int, j: int, more: Mapping[int, int] = MappingProxyType({})) -> bool:
        """A later step of a block that is of another size in the longer run."""
        born = self._short.births[i]
        return (
            born not in (NOWHERE, i)
            and more.get(born, self._partner.get(born)) == self._long.births[j]
            and self._short.sizeless[i] == self._long.sizeless[j]
        )

    def _ways(self, i: int, j: int) -> Iterator[tuple[int, int]]:
        """Tells where to go on from here, the likeliest first."""
        for period in self._periods(i, j):
            self._trail.append(Insertion(i, j, period))
            yield i, j + period * self._copies
        if self._may_be_resized(i, j):
            self._trail.append(i)
            self._partner[i] = j
            yield i + 1, j + 1
            del self._partner[i]

    def _may_be_resized(self, i: int, j: int) -> bool:
        """Whether two births may be of one block that each layer makes larger by as much."""
        short, long = self._short, self._long
        if i >= len(short.symbols) or j >= len(long.symbols) or short.sizeless[i] != long.sizeless[j]:
            return False
        more = long.sizes[j] - short.sizes[i]
        return short.births[i] == i and long.births[j] == j and more > 0 and more % self._copies == 0

    def _periods(self, i: int, j: int) -> list[int]:
        """Lengths of a copy with which the runs meet again, those first with which they go on alike for longest."""
        long, copies = self._long.symbols, self._copies
        more = (len(long) - j) - (len(self._short.symbols) - i)
        self._looks += max(more, 0) // copies
        found = []
        for period in range(1, more // copies + 1):
            stop = j + period * copies
            if long[j] == long[j + period] and long[j : stop - period] == long[j + period : stop]:
                alike = self._alike(i, stop)
                if alike:
                    found.append((-alike, period))
        return [period for _, period in sorted(found)]

    def _alike(self, i: int, j: int) -> int:
        """Steps for which the runs go on alike, up to a sure number; to end together is as sure."""
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
