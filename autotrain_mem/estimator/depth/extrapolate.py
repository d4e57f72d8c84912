"""A run of the whole depth, made of two runs of the same model with few layers.

Layers that are alike do alike, so what the longer of the two runs has more than the shorter (see ``alignment``) is what
the whole has more still. Its blocks are told apart by the place where they are born: each death ends the oldest, or the
newest, or the n-th of those that were born at one place, and both runs must agree on which. Where they do not, or where
anything else is not a plain continuation, there is no expansion: the whole is to be rehearsed.

Example: Qwen2.5-0.5B has 24 layers; 1 and 3 of them are rehearsed in a quarter of the time, and give the same events.
"""

from __future__ import annotations

from collections.abc import Container, Hashable
from dataclasses import replace

from autotrain_mem.estimator.depth.alignment import NOWHERE, Alignment, Steps, Vocabulary, align, steps_of
from autotrain_mem.estimator.depth.steps import (
    Act,
    Birth,
    Death,
    Layer,
    Pick,
    Picks,
    Stretch,
    UnclearError,
    Use,
    Writer,
    agreed,
)
from autotrain_mem.spec import Block, Phase, Trace
from autotrain_mem.spec.model import LAYERS_HELD_BACK, Depths

MOST_MISTAKES = 50
"""Steps that seem alike and are not, before two runs are given up."""


def expand(short: Trace, long: Trace, depths: Depths) -> Trace | None:
    """The trace of the whole depth, or None where the two do not tell it for sure.

    ``seconds`` is what both rehearsals took together.

    Args:
        short: A rehearsal of ``depths.short`` layers.
        long: The same of ``depths.long``.
    """
    if (short.not_counted, short.loss_chunks) != (long.not_counted, long.loss_chunks):
        return None
    if depths.copies < 2 or _is_held_back(long, depths):
        return None
    vocabulary = Vocabulary()
    pair = steps_of(short, vocabulary), steps_of(long, vocabulary)
    kinds = tuple(_picks(one, [("kind", symbol) for symbol in one.symbols]) for one in pair)
    unlike: Container[tuple[int, int]] = frozenset()
    mistakes = _Mistakes(*kinds)
    while len(mistakes.pairs) < MOST_MISTAKES:
        alignment = align(*pair, depths.copies, unlike)
        if alignment is None:
            return None
        try:
            return _Expansion((short, long), pair, kinds, alignment, depths, vocabulary).trace()
        except _NotAlikeError as error:
            unlike = mistakes  # from here on, steps are looked at more closely
            mistakes.pairs.add(error.steps)
        except UnclearError:
            return None
    return None


def _is_held_back(trace: Trace, depths: Depths) -> bool:
    """Whether blocks wait on another stream for more layers to pass than the shorter run has."""
    return depths.short <= LAYERS_HELD_BACK and any(block.stream for block in trace.blocks)


def expand_loss(few: Trace, more: Trace, *, short: int, long: int) -> Trace | None:
    """The same for a loss that was rehearsed with few of its chunks; None where its chunks are not told for sure.

    Args:
        few: A rehearsal with ``short`` chunks; it comes back as it is where no loss was cut.
        more: The same with ``long`` chunks.
    """
    if not few.loss_chunks:
        return few
    if len(few.loss_chunks) > 1 or few.loss_chunks != more.loss_chunks:
        return None  # an evaluation whose batches are of another size, say
    (whole,) = few.loss_chunks
    whole_trace = expand(few, more, Depths(short=short, long=long, whole=whole))
    work = few.work.of_chunks(more.work, short=short, long=long, whole=whole)
    return None if whole_trace is None else replace(whole_trace, loss_chunks=(), work=work)


class _NotAlikeError(UnclearError):
    """A step of the shorter run and one of the longer were taken for the same, and are not."""

    def __init__(self, short: int, long: int) -> None:
        super().__init__()
        self.steps = (short, long)


class _Mistakes:
    """Steps of the shorter run and of the longer that are not the same, though they look it."""

    def __init__(self, short: Picks, long: Picks) -> None:
        self._short, self._long = short, long
        self.pairs: set[tuple[int, int]] = set()
        """Known from having tried."""

    def __contains__(self, steps: object) -> bool:
        """Blocks of a kind are ended in turn, whichever way: another rank from either end is another block."""
        assert isinstance(steps, tuple)
        one, other = self._short.get(steps[0]), self._long.get(steps[1])
        if one is None or other is None:
            return steps in self.pairs
        differ = one.from_oldest != other.from_oldest and one.from_newest != other.from_newest
        return differ or steps in self.pairs


class _Expansion:
    """Learns what each step does, and does it as often as the whole has it."""

    def __init__(
        self,
        traces: tuple[Trace, Trace],
        steps: tuple[Steps, Steps],
        kinds: tuple[Picks, ...],
        alignment: Alignment,
        depths: Depths,
        vocabulary: Vocabulary,
    ) -> None:
        self._traces, self._steps, self._alignment, self._depths = traces, steps, alignment, depths
        self._vocabulary = vocabulary
        self._resized = frozenset(alignment.resized)
        self._places = _places(*steps, alignment, depths.copies)
        by_place = tuple(_picks(one, places) for one, places in zip(steps, self._places, strict=True))
        self._picks = (by_place, kinds)
        self._again = _born_again(steps[1])

    def trace(self) -> Trace:
        """The whole run. Raises UnclearError."""
        (short, long), depths = self._traces, self._depths
        writer = Writer()
        for stretch in self._stretches():
            stretch.write(writer)
        return Trace(
            blocks=tuple(writer.blocks),
            events=writer.events,
            phase_starts=tuple(writer.phase_starts),
            stream_uses=tuple(writer.stream_uses),
            operators=_extrapolated(depths, short.operators, long.operators),
            seconds=short.seconds + long.seconds,
            work=short.work.extrapolated(long.work, depths.all_copies / depths.copies),
            not_counted=short.not_counted,
            loss_chunks=short.loss_chunks,
        )

    def _stretches(self) -> list[Stretch]:
        """Lists what both runs do, and between it what each layer does. Raises UnclearError."""
        stretches = []
        i = j = 0
        for one in self._alignment.insertions:
            stretches.append(self._done_by_both(i, one.short, j))
            acts = [self._in_copies(one.long + offset, one.period) for offset in range(one.period)]
            stretches.append(Stretch(acts, self._depths.all_copies))
            i, j = one.short, one.long + one.period * self._depths.copies
        return [*stretches, self._done_by_both(i, len(self._steps[0].symbols), j)]

    def _done_by_both(self, start: int, stop: int, long_start: int) -> Stretch:
        return Stretch([self._in_both(start + at, long_start + at) for at in range(stop - start)], 1)

    def _in_both(self, i: int, j: int) -> Act:
        long = self._steps[1]
        if long.births[j] == NOWHERE:
            return _bare(long.facts[j])
        if long.births[j] == j:
            return self._birth_in_both(i, j)
        try:
            return self._pick_act(j, agreed([(short[i], long[j]) for short, long in self._picks]))
        except UnclearError:
            raise _NotAlikeError(i, j) from None

    def _in_copies(self, first: int, period: int) -> Act:
        long = self._steps[1]
        each = range(first, first + period * self._depths.copies, period)
        if long.births[first] == NOWHERE:
            return _bare(long.facts[first])
        if long.births[first] == first:
            return self._birth_in_copies(each)
        return self._pick_act(first, agreed([[long[j] for j in each] for _, long in self._picks]))

    def _pick_act(self, j: int, pick: Pick) -> Act:
        stream = self._steps[1].facts[j]
        return Use(pick, stream) if isinstance(stream, int) else Death(pick)

    def _birth_in_both(self, i: int, j: int) -> Birth:
        one, other = self._block(0, i), self._block(1, j)
        size = _extrapolated(self._depths, one.size_bytes, other.size_bytes) if i in self._resized else one.size_bytes
        names = self._vocabulary.name(one.module), self._vocabulary.name(other.module)
        layer = None
        if names[0].layer is not None and names[1].layer is not None:
            layer = Layer(self._layer_in_both(names[0].layer, names[1].layer))
        return Birth(self._places_of(j), size, other, names[1].pattern, layer, j in self._again)

    def _layer_in_both(self, short: int, long: int) -> int:
        """Counted from the first layer when the runs agree so, else from the last."""
        if short == long:
            return short
        if self._depths.short - short != self._depths.long - long:
            raise UnclearError
        return self._depths.whole - (self._depths.short - short)

    def _birth_in_copies(self, each: range) -> Birth:
        block = self._block(1, each[0])
        layers = [self._vocabulary.name(self._block(1, j).module).layer for j in each]
        name = self._vocabulary.name(block.module)
        layer = None if name.layer is None else self._layer_in_copies([one for one in layers if one is not None])
        return Birth(self._places_of(each[0]), block.size_bytes, block, name.pattern, layer, each[0] in self._again)

    def _layer_in_copies(self, layers: list[int]) -> Layer:
        """Upwards counted from the first layer, downwards from the last."""
        step = layers[1] - layers[0]
        if layers != [layers[0] + step * copy for copy in range(len(layers))]:
            raise UnclearError
        return Layer(layers[0] if step >= 0 else self._depths.whole - (self._depths.long - layers[0]), step)

    def _places_of(self, j: int) -> tuple[Hashable, ...]:
        return self._places[1][j], ("kind", self._steps[1].symbols[j])

    def _block(self, run: int, step: int) -> Block:
        return self._traces[run].blocks[abs(self._steps[run].events[step]) - 1]


def _extrapolated(depths: Depths, short: int, long: int) -> int:
    """Extends what grows by as much with each layer. Raises UnclearError when it does not."""
    each, rest = divmod(long - short, depths.copies)
    if rest:
        raise UnclearError
    return short + each * depths.all_copies


def _bare(fact: Hashable) -> Act:
    return fact if isinstance(fact, Phase) else None


def _places(short: Steps, long: Steps, alignment: Alignment, copies: int) -> tuple[list[Hashable], list[Hashable]]:
    """Finds where each step of either run happens: at a step of a layer, whichever layer it is, or at one of a kind.

    What stands before an insertion and is like its copies is of the layers before: it has their places.
    """
    of_short: list[Hashable] = list(range(len(short.symbols)))
    of_long: list[Hashable] = []
    done = 0
    for number, one in enumerate(alignment.insertions):
        at = one.short - 1
        while at >= done and short.symbols[at] == long.symbols[one.long + (at - one.short) % one.period]:
            of_short[at] = (number, (at - one.short) % one.period)
            at -= 1
        of_long += of_short[done : one.short]
        of_long += [(number, offset) for offset in range(one.period)] * copies
        done = one.short
    return of_short, of_long + of_short[done:]


def _picks(steps: Steps, places: list[Hashable]) -> dict[int, Pick]:
    """Finds which of the living each death and use concerns."""
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
        index = there.index(born)
        picks[step] = Pick(place, index, len(there) - 1 - index)
        if steps.facts[step] is None:
            del there[index]
    return picks


def _born_again(steps: Steps) -> frozenset[int]:
    """Births of a block that was born before."""
    seen: set[int] = set()
    again: set[int] = set()
    for step, event in enumerate(steps.events):
        if event > 0:
            (again if event in seen else seen).add(step if event in seen else event)
    return frozenset(again)
