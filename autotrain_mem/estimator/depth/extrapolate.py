"""Makes a run of the whole depth of two runs of the same model with few layers.

Layers that are alike do alike, so what the longer of the two runs has more than the shorter (see ``alignment``) is what
the whole has more still. Its blocks are told apart by the place where they are born: each death ends the oldest, or the
newest, or the n-th of those that were born at one place, and both runs must agree on which. Where they do not, or where
anything else is not a plain continuation, there is no expansion: the whole is to be rehearsed.

Example: Qwen2.5-0.5B has 24 layers; 1 and 3 of them are rehearsed in a quarter of the time, and give the same events.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from autotrain_mem.estimator.depth.alignment import NOWHERE, Alignment, Search, Steps, Vocabulary, name_of, steps_of
from autotrain_mem.spec import Block, Phase, Trace
from autotrain_mem.spec.model import LAYERS_HELD_BACK, Depths
from autotrain_mem.spec.trace import CACHE_EMPTIED, StreamUse

MOST_MISTAKES = 50
"""Steps that seem alike and are not, before two runs are given up."""


def expand(short: Trace, long: Trace, depths: Depths) -> Trace | None:
    """Returns the trace of the whole depth, or None where the two do not tell it for sure.

    ``seconds`` is what both rehearsals took together.

    Args:
        short: A rehearsal of ``depths.short`` layers.
        long: The same of ``depths.long``.
    """
    if (short.not_counted, short.loss_chunks) != (long.not_counted, long.loss_chunks):
        return None
    waits = any(block.stream for block in long.blocks)  # on another stream, for more layers to pass than there are
    if depths.copies < 2 or (waits and depths.short <= LAYERS_HELD_BACK):
        return None
    vocabulary = Vocabulary()
    pair = steps_of(short, vocabulary), steps_of(long, vocabulary)
    kinds = tuple(_picks(one, [("kind", symbol) for symbol in one.symbols]) for one in pair)
    unlike: Container[tuple[int, int]] = frozenset()
    mistakes = _Mistakes(*kinds)
    while len(mistakes.pairs) < MOST_MISTAKES:
        alignment = Search(*pair, depths.copies, unlike).alignment()
        if alignment is None:
            return None
        try:
            return _Expansion((short, long), pair, kinds, alignment, depths).trace()
        except _NotAlikeError as error:
            unlike = mistakes  # from here on, steps are looked at more closely
            mistakes.pairs.add(error.steps)
        except UnclearError:
            return None
    return None


def expand_loss(few: Trace, more: Trace, *, short: int, long: int) -> Trace | None:
    """Does the same for a loss that was rehearsed with few of its chunks; None where these are not told for sure.

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


# -- what a step does, for any number of layers --------------------------------------------------------------------


class UnclearError(Exception):
    """Says that the two runs do not tell what the whole does."""


Picks = Mapping[int, "Pick"]
"""Of each death and use in a run, by its step."""


@dataclass(frozen=True, slots=True)
class Pick:
    """Names one of the living blocks that were born at a place, by its rank among them."""

    place: Hashable
    from_oldest: int | None
    from_newest: int | None

    def of(self, living: Sequence[int]) -> int:
        """Returns its index. Raises UnclearError where there is none, or where the two ranks name two."""
        count = len(living)
        index = self.from_oldest if self.from_oldest is not None else count - 1 - (self.from_newest or 0)
        if not 0 <= index < count or (self.from_newest is not None and count - 1 - self.from_newest != index):
            raise UnclearError
        return index


def agreed(alternatives: Sequence[Sequence[Pick]]) -> Pick:
    """Finds what several picks have in common, in the first way of looking in which they have. Raises UnclearError."""
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
    """Makes a block, in as many copies as are asked for."""

    places: tuple[Hashable, ...]
    size_bytes: int
    like: Block
    pattern: str
    layer: int | None
    """The layer of its module in the first copy; None where it belongs to none."""
    layer_step: int
    """From one copy to the next."""
    again: bool
    """Whether it takes the number of a block that is dead (see ``Trace``)."""

    def block(self, copy: int) -> Block:
        """Makes the block of one copy, counted from 0."""
        if self.layer is None and self.size_bytes == self.like.size_bytes:
            return self.like
        module = self.like.module if self.layer is None else self.pattern.format(self.layer + self.layer_step * copy)
        return Block(size_bytes=self.size_bytes, owner=self.like.owner, module=module, stream=self.like.stream)


@dataclass(frozen=True, slots=True)
class Use:
    """Uses a block on another stream; where there is none it dies."""

    pick: Pick
    stream: int | None


Act = Birth | Use | Phase | None
"""What one step does; None empties the cache."""


class Writer:
    """Writes the events of the whole run, as they come."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.events: array[int] = array("q")
        self.phase_starts: list[tuple[int, Phase]] = []
        self.stream_uses: list[StreamUse] = []
        self._living: dict[Hashable, list[int]] = {}
        self._places: dict[int, tuple[Hashable, ...]] = {}
        self._dead: dict[Block, list[int]] = {}

    def write(self, act: Act, copy: int) -> None:
        """Does what a step does, in one copy of it."""
        if isinstance(act, Use):
            living = self._living.get(act.pick.place, [])
            number = living[act.pick.of(living)]
            if act.stream is None:
                self._end(number)
            else:
                self.stream_uses.append(StreamUse(len(self.events), number, act.stream))
        elif isinstance(act, Birth):
            number = self._number(act, copy)
            self._places[number] = act.places
            for place in act.places:
                self._living.setdefault(place, []).append(number)
            self.events.append(number)
        elif act is None:
            self.events.append(CACHE_EMPTIED)
        else:
            self.phase_starts.append((len(self.events), act))

    def _end(self, number: int) -> None:
        for place in self._places.pop(number):
            self._living[place].remove(number)
        self._dead.setdefault(self.blocks[number - 1], []).append(number)
        self.events.append(-number)

    def _number(self, birth: Birth, copy: int) -> int:
        block = birth.block(copy)
        if birth.again and (dead := self._dead.get(block)):
            return dead.pop()
        self.blocks.append(block)
        return len(self.blocks)


# -- learning it from two runs ---------------------------------------------------------------------------------------


class _NotAlikeError(UnclearError):
    """Says that a step of the shorter run and one of the longer were taken for the same, and are not."""

    def __init__(self, short: int, long: int) -> None:
        super().__init__()
        self.steps = (short, long)


class _Mistakes:
    """Holds steps of the shorter run and of the longer that are not the same, though they look it."""

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
    ) -> None:
        self._traces, self._steps, self._alignment, self._depths = traces, steps, alignment, depths
        self._resized = frozenset(alignment.resized)
        self._places = _places(*steps, alignment, depths.copies)
        by_place = tuple(_picks(one, places) for one, places in zip(steps, self._places, strict=True))
        self._picks = (by_place, kinds)
        self._again = _born_again(steps[1])

    def trace(self) -> Trace:
        """Returns the whole run. Raises UnclearError."""
        (short, long), depths = self._traces, self._depths
        writer = Writer()
        for acts, copies in self._stretches():
            for copy in range(copies):
                for act in acts:
                    writer.write(act, copy)
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

    def _stretches(self) -> list[tuple[list[Act], int]]:
        """Lists what both runs do, and between it what each layer does, how often. Raises UnclearError."""
        stretches: list[tuple[list[Act], int]] = []
        i = j = 0
        for one in self._alignment.insertions:
            stretches.append((self._done_by_both(i, one.short, j), 1))
            layer = [self._in_copies(one.long + offset, one.period) for offset in range(one.period)]
            stretches.append((layer, self._depths.all_copies))
            i, j = one.short, one.long + one.period * self._depths.copies
        return [*stretches, (self._done_by_both(i, len(self._steps[0].symbols), j), 1)]

    def _done_by_both(self, start: int, stop: int, long_start: int) -> list[Act]:
        return [self._in_both(start + at, long_start + at) for at in range(stop - start)]

    def _in_both(self, i: int, j: int) -> Act:
        long = self._steps[1]
        if long.births[j] == NOWHERE:
            return _bare(long.facts[j])
        if long.births[j] == j:
            return self._birth_in_both(i, j)
        try:
            return self._use(j, agreed([(short[i], long[j]) for short, long in self._picks]))
        except UnclearError:
            raise _NotAlikeError(i, j) from None

    def _in_copies(self, first: int, period: int) -> Act:
        long = self._steps[1]
        each = range(first, first + period * self._depths.copies, period)
        if long.births[first] == NOWHERE:
            return _bare(long.facts[first])
        if long.births[first] == first:
            return self._birth_in_copies(each)
        return self._use(first, agreed([[long[j] for j in each] for _, long in self._picks]))

    def _use(self, j: int, pick: Pick) -> Use:
        stream = self._steps[1].facts[j]
        return Use(pick, stream if isinstance(stream, int) else None)

    def _birth_in_both(self, i: int, j: int) -> Birth:
        """Counts its layer from the first one when the runs agree so, else from the last."""
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
        """Counts layers upwards from the first one, downwards from the last."""
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
        return Birth(places, size_bytes, block, name_of(block.module).pattern, layer, step, j in self._again)

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
