"""Extrapolates two runs of a model with few layers, and few chunks of its loss, to the whole model.

Equal layers do the same, so the events that the longer run has in addition (see ``alignment``) are repeated for the
other layers. A block's birth is its allocation, and its death its free. Blocks are identified by the place of their
birth: each death frees the oldest, the newest, or the n-th of the blocks born at one place, and both runs must agree on
which. If they do not, or if anything else cannot be extrapolated, the whole model is rehearsed instead.

If the loss processes the tokens in chunks, the longer run also has more chunks. A block belongs to a chunk if it was
born in a pass over the chunks, and to a layer otherwise. With any number of chunks, a loss takes the same inputs and
returns the same scalar and gradients. The longer run has two more layers and three more chunks, so that layers and
chunks cannot be confused.

Example: Qwen2.5-0.5B has 24 layers; rehearsing 1 and 3 of them takes a quarter of the time and gives the same events.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Container, Hashable, Iterator
from dataclasses import fields
from functools import cache
from typing import Any

from autotrain_mem.estimator.depth import alignment as align
from autotrain_mem.estimator.depth.alignment import NOWHERE, Alignment, Steps, name_of, steps_of
from autotrain_mem.estimator.depth.writer import Act, Birth, Pick, Picks, UnclearError, Use, Writer, agreed
from autotrain_mem.types import Block, Depths, EngineMark, Phase, Trace, Trained, Workload
from autotrain_mem.types.trace import RunFacts

SIZES = tuple(each.name for each in fields(RunFacts) if each.name.endswith("_bytes"))

MOST_MISTAKES = 50
"""The most pairs of steps that look alike but differ, before the extrapolation is given up."""


def expand(short: Trace, long: Trace, depths: Depths) -> Trace | None:
    """Returns the trace of the whole model, or None if the two runs do not determine it. The runs have ``depths.short``
    and ``depths.long`` layers, and perhaps shortened losses; the trace's ``seconds`` are the sum of theirs."""
    was_on = gc.isenabled()
    gc.disable()  # took half of the time: millions of small objects are made here, without reference cycles
    try:
        chunks = _chunks(short, long)
        waits = any(block.stream for block in long.blocks)  # held back on another stream for more layers than there are
        differ = short.not_counted != long.not_counted or short.routing is not long.routing
        is_too_short = any(growth.copies < 2 for growth in (depths, chunks or depths))
        if differ or is_too_short or (waits and not depths.sees_held_back):
            return None
        vocabulary = align.Vocabulary()
        pair = steps_of(short, vocabulary), steps_of(long, vocabulary)
        kinds = _picks_by_kind(pair[0]), _picks_by_kind(pair[1])
        unlike: Container[tuple[int, int]] = frozenset()
        mistakes = _Mistakes(*kinds)
        while len(mistakes.pairs) < MOST_MISTAKES:
            if (alignment := align.Search(*pair, depths, chunks, unlike).alignment()) is None:
                return None
            try:
                return _Expansion((short, long), pair, kinds, alignment, depths, chunks).trace()
            except _NotAlikeError as error:
                unlike = mistakes  # from here on, picks are compared as well
                mistakes.pairs.add(error.steps)
        return None
    except UnclearError:
        return None
    finally:
        if was_on:
            gc.enable()


class _NotAlikeError(UnclearError):
    """Signals that two matched steps differ."""

    def __init__(self, short: int, long: int) -> None:
        super().__init__()
        self.steps = (short, long)


_KindPicks = Callable[[], Picks]
"""Returns picks among all live blocks of a kind, computed on first use only: those within a place usually suffice."""


class _Mistakes:
    """Holds pairs of steps that look the same and differ."""

    def __init__(self, short: _KindPicks, long: _KindPicks) -> None:
        self._short, self._long = short, long
        self.pairs: set[tuple[int, int]] = set()
        """Pairs for which an extrapolation failed."""

    def __contains__(self, steps: object) -> bool:
        """Returns whether the steps' picks differ, or failed in an extrapolation. Blocks of a kind are freed oldest or
        newest first, so picks differ if the ranks from both ends differ."""
        assert isinstance(steps, tuple)
        one, other = self._short().get(steps[0]), self._long().get(steps[1])
        if one is None or other is None:
            return steps in self.pairs
        differ = one.from_oldest != other.from_oldest and one.from_newest != other.from_newest
        return differ or steps in self.pairs


class _Expansion:
    """Derives from both runs what each step does, and repeats it for the whole model."""

    def __init__(
        self,
        traces: tuple[Trace, Trace],
        steps: tuple[Steps, Steps],
        kinds: tuple[_KindPicks, _KindPicks],
        alignment: Alignment,
        depths: Depths,
        chunks: Depths | None,
    ) -> None:
        self._traces, self._steps, self._alignment = traces, steps, alignment
        self._depths, self._chunks = depths, chunks
        self._resized = frozenset(alignment.resized)
        self._places = _places(*steps, alignment)
        self._by_place = _picks(steps[0], self._places[0]), _picks(steps[1], self._places[1])
        self._kinds = kinds

    def trace(self) -> Trace:
        """Returns the whole run. Raises UnclearError if the two runs do not determine it."""
        (short, long), depths = self._traces, self._depths
        stretches = self._stretches()

        writer = Writer({act.pick.place for acts, _ in stretches for act in acts if isinstance(act, Use)})
        for acts, copies in stretches:
            writer.write(acts, copies)
        of_loss = [sum(one.operators for one in trace.loss_passes) for trace in self._traces]
        others = [trace.operators - count for trace, count in zip(self._traces, of_loss, strict=True)]
        sizes: Any = {name: _extrapolated(depths, getattr(short, name), getattr(long, name)) for name in SIZES}
        return Trace(
            blocks=tuple(writer.blocks),
            events=writer.events,
            phase_starts=tuple(writer.phase_starts),
            marks=tuple(writer.marks),
            stream_uses=tuple(writer.stream_uses),
            operators=_extrapolated(depths, *others) + _extrapolated(self._chunks or depths, *of_loss),
            seconds=short.seconds + long.seconds,
            work=self._work(),
            not_counted=short.not_counted,
            **sizes,
            routing=short.routing,
            trained=Trained.extrapolated(short.trained, long.trained, depths.copies, depths.all_copies),
        )

    def _work(self) -> Workload:
        """Computes the work of the whole run. Raises UnclearError if a chunk's work depends on the number of layers."""
        short, long = (trace.work for trace in self._traces)
        if self._chunks is not None:
            short = short.with_chunks(self._chunks.short, self._chunks.whole)
            long = long.with_chunks(self._chunks.long, self._chunks.whole)
            if short.of_chunks != long.of_chunks:
                raise UnclearError
        return short.extrapolated(long, self._depths.all_copies / self._depths.copies)

    def _stretches(self) -> list[tuple[list[Act], int]]:
        """Lists the steps of the whole run in groups, with repeats. Raises UnclearError if a step is not determined."""
        stretches: list[tuple[list[Act], int]] = []
        i = j = 0

        def done_by_both(stop: int) -> list[Act]:
            return [self._in_both(i + at, j + at) for at in range(stop - i)]

        for one in self._alignment.insertions:
            stretches.append((done_by_both(one.short), 1))
            copy = [self._in_copies(one, one.long + offset) for offset in range(one.period)]
            stretches.append((copy, one.growth.all_copies))
            i, j = one.short, one.long + one.period * one.growth.copies
        return [*stretches, (done_by_both(len(self._steps[0].symbols)), 1)]

    def _in_both(self, i: int, j: int) -> Act:
        long = self._steps[1]
        if long.births[j] == NOWHERE:
            return _bare(long.facts[j])
        if long.births[j] == j:
            return self._birth_in_both(i, j)
        try:
            return self._use(j, agreed((short[i], long[j]) for short, long in self._ways_of_looking()))
        except UnclearError:
            raise _NotAlikeError(i, j) from None

    def _in_copies(self, one: align.Insertion, first: int) -> Act:
        long = self._steps[1]
        each = range(first, first + one.period * one.growth.copies, one.period)
        if long.of_loss[first] is not long.of_loss[one.long]:
            raise UnclearError  # a copy is a layer or a chunk, not both
        if long.births[first] == NOWHERE:
            return _bare(long.facts[first])
        if long.births[first] == first:
            return self._birth_in_copies(each)
        return self._use(first, agreed([long[j] for j in each] for _, long in self._ways_of_looking()))

    def _ways_of_looking(self) -> Iterator[tuple[Picks, Picks]]:
        yield self._by_place
        yield self._kinds[0](), self._kinds[1]()

    def _use(self, j: int, pick: Pick) -> Use:
        stream = self._steps[1].facts[j]
        return Use(pick, stream if isinstance(stream, int) else None)

    def _birth_in_both(self, i: int, j: int) -> Birth:
        """Makes the birth of a block in both runs; its layer is the same in both, counted from the first or last."""
        one, other = self._block(0, i), self._block(1, j)
        size = _extrapolated(self._depths, one.size_bytes, other.size_bytes) if i in self._resized else one.size_bytes
        layer, long_layer = name_of(one.module).layer, name_of(other.module).layer
        if layer is None or long_layer is None:
            return self._birth(j, size, None)
        if layer != long_layer:
            if self._depths.short - layer != self._depths.long - long_layer:
                raise UnclearError
            layer += self._depths.whole - self._depths.short
        return self._birth(j, size, layer)

    def _birth_in_copies(self, each: range) -> Birth:
        """Makes the birth of a block in each copy; layers count up from the first one, or down from the last."""
        size_bytes = self._block(1, each[0]).size_bytes
        layers = [name_of(self._block(1, j).module).layer for j in each]
        numbers = [layer for layer in layers if layer is not None]
        if layers[0] is None:
            return self._birth(each[0], size_bytes, None)
        step = numbers[1] - numbers[0]
        if numbers != [numbers[0] + step * copy for copy in range(len(numbers))]:
            raise UnclearError
        first = numbers[0] if step >= 0 else self._depths.whole - (self._depths.long - numbers[0])
        return self._birth(each[0], size_bytes, first, step)

    def _birth(self, j: int, size_bytes: int, layer: int | None, step: int = 0) -> Birth:
        block = self._block(1, j)
        places = (self._places[1][j], ("kind", self._steps[1].symbols[j]))
        return Birth(places, size_bytes, block, name_of(block.module).pattern, layer, step)

    def _block(self, run: int, step: int) -> Block:
        return self._traces[run].blocks[abs(self._steps[run].events[step]) - 1]


def _extrapolated(depths: Depths, short: int, long: int) -> int:
    """Extrapolates a quantity. Raises UnclearError if it does not grow evenly with the layers."""
    each, rest = divmod(long - short, depths.copies)
    if rest:
        raise UnclearError
    return short + each * depths.all_copies


def _chunks(short: Trace, long: Trace) -> Depths | None:
    """Counts the chunks of a shortened loss; None if no loss was shortened. Raises UnclearError if losses differ."""
    if not short.loss_chunks and not long.loss_chunks:
        return None
    few_passes, more_passes = short.loss_passes, long.loss_passes
    if short.loss_chunks != long.loss_chunks or len(few_passes) != len(more_passes):
        raise UnclearError
    rehearsed = {(few.chunks, more.chunks) for few, more in zip(few_passes, more_passes, strict=True)}
    cut = [(few, more) for few, more in rehearsed if few != more]
    if len(short.loss_chunks) > 1 or len(cut) != 1:
        raise UnclearError  # such as an evaluation with another batch size
    ((few, more),) = cut
    return Depths(short=few, long=more, whole=short.loss_chunks[0])


def _bare(fact: Hashable) -> Act:
    return fact if isinstance(fact, Phase | EngineMark | int) else None


def _places(short: Steps, long: Steps, alignment: Alignment) -> tuple[list[Hashable], list[Hashable]]:
    """Returns the place of each step in both runs; corresponding steps of all layers share a place. Steps just
    before an insertion that equal the steps of its copies belong to earlier layers, and get the copies' places."""
    of_short: list[Hashable] = list(range(len(short.symbols)))
    of_long: list[Hashable] = []
    done = 0
    for number, one in enumerate(alignment.insertions):
        at = one.short - 1
        while at >= done and short.symbols[at] == long.symbols[one.long + (at - one.short) % one.period]:
            of_short[at] = (number, (at - one.short) % one.period)
            at -= 1
        of_long += of_short[done : one.short]
        of_long += [(number, offset) for offset in range(one.period)] * one.growth.copies
        done = one.short
    return of_short, of_long + of_short[done:]


def _picks_by_kind(steps: Steps) -> _KindPicks:
    return cache(lambda: _picks(steps, [("kind", symbol) for symbol in steps.symbols]))


def _picks(steps: Steps, places: list[Hashable]) -> Picks:
    """Finds the live block that each death or use concerns."""
    living: dict[Hashable, list[int]] = {}
    picks: dict[int, Pick] = {}
    for step, born in enumerate(steps.births):
        if born == NOWHERE:
            continue
        place = places[born]
        there = living.setdefault(place, [])
        if born == step:
            there.append(step)
            continue
        index = bisect_left(there, born)  # the live blocks of a place are in order of birth
        picks[step] = Pick(place, index, len(there) - 1 - index)
        if steps.facts[step] is None:
            del there[index]
    return picks
