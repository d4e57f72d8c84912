"""Derives the decode steps that a rehearsal of ``generate()`` skips (``rehearsal/generation.py``), for a replay.

All decode steps do the same. Most blocks have the same size in every step; the others grow evenly with the tokens, such
as the KV cache, up to a window. So two consecutive steps with the same events show all sizes of all steps, and which
blocks of a step the next one frees.

The steps of a deep model have thousands of events, so a replay leaves some out. The allocator's state is what is
allocated, and where. A stretch of events that frees all that it allocates leaves this state unchanged, unless it needs
memory from the device. It needs none if there is room for each of its requests. Suppose that a request of s bytes finds
n blocks of the stretch, with a bytes, in parts that were free before. If no remaining part has s bytes, then these
parts had less than a + s * (n + 1) bytes (n + 2 for two parts, and so on). So there is room if the parts of s bytes or
more have at least a + s * n bytes beyond s, in total. A stretch without this proof is replayed, but one of small blocks
only once beside about the same free blocks.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from functools import partial
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

from autotrain_mem.allocator.blocks import SMALL_BYTES, round_size
from autotrain_mem.allocator.simulator import CachingAllocator
from autotrain_mem.types import Trace

if TYPE_CHECKING:
    from autotrain_mem.estimator.replay import Replay

MOST_EVENTS = 800_000
"""The most events of skipped steps that one replay of a run makes in any case: about a second. Each generation has an
equal share. With more, only the growing blocks and those beside their births and frees are replayed, and then only
evenly spaced steps: with half of them, GRPO of Qwen3-8B with 4,096 tokens reserves 0.06 % less."""

ALIKE_BYTES = 256 << 10
"""The unit in which the sizes of free small blocks are compared. Memory for small blocks comes in segments of 2 MiB."""
NOT_DERIVED = "memory reserved while answers grow: the decode steps that were rehearsed are not alike"
"""What a replay leaves out if :func:`skipped_steps` fails."""
_BIRTH, _CARRIED = -1, -2
"""What an event of a step does: it allocates a block, or frees one of an earlier step. Any other number is the position
of the event that allocates the block that this event frees."""

_PoolKey = tuple[int, bool]
"""A stream, and whether blocks are small."""


class _Step:
    """Holds the events of one rehearsed step. ``tokens``: the length of the KV cache after it."""

    def __init__(self, trace: Trace, start: int, stop: int, tokens: int) -> None:
        self.tokens, self.events = tokens, [event for event in trace.events[start:stop] if event]
        self.sizes = [trace.blocks[abs(event) - 1].size_bytes for event in self.events]
        self.births = {event: position for position, event in enumerate(self.events) if event > 0}
        self.shape = [_BIRTH if event > 0 else self.births.get(-event, _CARRIED) for event in self.events]
        self.frees = {birth: position for position, birth in enumerate(self.shape) if birth >= 0}
        self.survivors = [birth for birth in self.births.values() if birth not in self.frees]
        self.carried = [position for position, what in enumerate(self.shape) if what == _CARRIED]
        """The positions at which blocks of earlier steps are freed."""


class Stretch:
    """Collects events that free all that they allocate, in one pool."""

    def __init__(self, key: _PoolKey) -> None:
        self.events: list[int] = []
        self._stream, self._is_small = key
        self._live: dict[int, int] = {}
        self._needs: list[tuple[int, int]] = []
        """The requests for which there must be room: sizes, and bytes beyond them. Others need less."""
        self._known: set[tuple[int, ...]] = set()
        """The free small blocks, roughly, beside which a replay needed no memory."""

    @property
    def is_closed(self) -> bool:
        """Returns whether all that it allocates is freed."""
        return not self._live

    def add(self, event: int, size: int) -> None:
        self.events.append(event)
        if event < 0:
            del self._live[-event]
            return
        beyond = size * len(self._live) + sum(self._live.values())
        if not any(other >= size and more >= beyond for other, more in self._needs):
            self._needs = [need for need in self._needs if need[0] > size or need[1] > beyond]
            self._needs.append((size, beyond))
        # A large block may be up to 1 MiB larger than requested (``CUDACachingAllocator.cpp: should_split``).
        self._live[event] = size + (0 if self._is_small else SMALL_BYTES)

    def is_neutral(self, allocator: CachingAllocator) -> bool:
        """Returns whether a replay would leave the allocator's state unchanged."""
        pool = allocator.small if self._is_small else allocator.large
        if all(pool.has_room(size, beyond, self._stream) for size, beyond in self._needs):
            return True
        return self._is_small and self._free(allocator) in self._known

    def replay(self, allocator: CachingAllocator, base: int) -> Iterator[int]:
        """Yields the events, for blocks with numbers from ``base`` on."""
        before = allocator.reserved_bytes
        yield from (event + base if event > 0 else event - base for event in self.events)
        if allocator.reserved_bytes == before:
            self._known.add(self._free(allocator))

    def _free(self, allocator: CachingAllocator) -> tuple[int, ...]:
        sizes = allocator.small.free_sizes(self._stream)
        return tuple(size // ALIKE_BYTES for size in sizes if size >= ALIKE_BYTES)


_Acts = list[list[int] | Stretch]
"""What is replayed of a step: events, and stretches to leave out if possible. ``+n`` allocates the block at position
``n - 1``; ``-n`` frees this block, or the one of an earlier step that is freed at this position."""


class SkippedSteps:
    """Holds what is known of the skipped steps of one generation.

    The trace's events from ``start`` to ``stop`` replace them, and move the loop's state. ``first`` is the step before
    them, and ``last`` lists the next ones. ``most_events``: see :data:`MOST_EVENTS`. Raises ValueError if the steps are
    not alike.
    """

    def __init__(
        self, trace: Trace, start: int, stop: int, steps: range, first: _Step, last: list[_Step], most_events: int
    ) -> None:
        self.start, self.stop, self._steps, self._first = start, stop, steps, first
        alike = [(one, other) for one, other in pairwise(last) if one.shape == other.shape]
        if not alike:
            raise ValueError("no two consecutive steps have the same events")
        (one, other), (after, following) = alike[0], last[:2]
        self._one, self._other = one, other
        self._streams = [trace.blocks[abs(event) - 1].stream for event in one.events]
        self._before = dict(zip(one.survivors, first.survivors, strict=True))
        births = {position: one.births.get(-other.events[position]) for position in other.carried}
        older = [position for position, birth in births.items() if birth is None]
        left = [birth for birth in one.survivors if birth not in births.values()]
        self._older = dict(zip(older, left, strict=True)) if len(older) == len(left) else {}
        """Maps frees of blocks of the step before the previous one to the births of these blocks."""
        self._carried = {free: birth for free, birth in births.items() if birth is not None} | self._older
        """Maps frees of earlier steps' blocks to the births of these blocks."""
        ends = {free: -after.events[its] for free, its in zip(other.carried, after.carried, strict=True)}
        next_ends = {free: -following.events[its] for free, its in zip(other.carried, following.carried, strict=True)}
        self._ends = {free: (ends[free], next_ends[free]) for free in self._carried}
        """Maps the same frees to the numbers of the blocks that the next two steps free."""
        self._starts = {free: first.events[self._before[birth]] for free, birth in self._carried.items()}
        moved = {
            *self._starts.values(),
            *(ends[free] for free in self._carried),
            *(next_ends[free] for free in self._older),
        }
        jump = {*trace.events[start:stop]}
        jumped = [event for event in trace.events[start:stop] if abs(event) not in moved and -event not in jump]
        added = [event for event in jumped if event > 0]
        kept = [birth for birth in one.survivors if birth not in self._carried.values()]
        are_kept = len(added) == len(kept) * len(steps)
        self._kept = {birth: added[index :: len(kept)] for index, birth in enumerate(kept)} if are_kept else {}
        """Maps births of blocks that no step frees (scores) to the numbers of these blocks in the skipped steps."""
        self._jumped = [event for event in jumped if event < 0 or not are_kept]
        known = {*one.frees, *self._carried.values(), *self._kept}
        owners = ({_BIRTH: at, _CARRIED: self._carried.get(at)}.get(what, what) for at, what in enumerate(one.shape))
        self._owners = [birth if birth in known else None for birth in owners]
        """For each event the birth of its block; None for a block that only the rehearsed steps have."""
        self._plan = self._planned(most_events)

    def events(self, replay: "Replay") -> Iterator[int]:
        """Yields the events of the skipped steps. Adds their blocks to the replay, and moves blocks' addresses."""
        requests, addresses, base = replay.requests, replay.addresses, len(replay.addresses)
        requests += [(0, stream) for stream in self._streams]
        addresses += [0] * len(self._streams)
        yield from self._jumped
        previous = {free: addresses[number - 1] for free, number in self._starts.items()}
        """The addresses of the previous step's blocks, by the events that free them."""
        for free in self._carried:
            addresses[base + free] = addresses[self._ends[free][0] - 1] if free in self._older else previous[free]
        settings = replay.allocator.settings
        is_provable = settings.max_split_bytes is None and not settings.garbage_collection_threshold
        kept = [(birth, iter(numbers)) for birth, numbers in self._kept.items()]
        for steps, acts in self._plan:
            growing: list[tuple[int, int, int]] = []
            for birth in self._one.births.values():
                size = self._size(birth, steps[0])
                requests[base + birth] = size, self._streams[birth]
                if per_token := (self._size(birth, steps[-1]) - size) // max(steps[-1] - steps[0], 1):
                    growing.append((birth, size - per_token * steps[0], per_token))
            own = [
                act if isinstance(act, Stretch) else [event + base if event > 0 else event - base for event in act]
                for act in acts
            ]
            for tokens in steps:
                for birth, fixed, per_token in growing:
                    requests[base + birth] = fixed + per_token * tokens, self._streams[birth]
                for act in own:
                    if isinstance(act, list):
                        yield from act
                    elif not (is_provable and act.is_neutral(replay.allocator)):
                        yield from act.replay(replay.allocator, base)
                for birth, numbers in kept:
                    addresses[next(numbers) - 1] = addresses[base + birth]
                for free, birth in self._carried.items():
                    addresses[base + free] = previous[free] if free in self._older else addresses[base + birth]
                for free, birth in self._older.items():
                    previous[free] = addresses[base + birth]
        for _, numbers in kept:
            yield from numbers
        for free, (number, following) in self._ends.items():
            addresses[number - 1] = addresses[base + free]
            if free in self._older:
                addresses[following - 1] = previous[free]

    def _size(self, birth: int, tokens: int) -> int:
        """Returns the bytes of a block in the step with this length of the KV cache. What stops growing in a window was
        proportional to the length before."""
        size, following = self._one.sizes[birth], self._other.sizes[birth]
        if size == following and birth in self._before:
            return min(size, self._first.sizes[self._before[birth]] * tokens // self._first.tokens)
        return max(size + (following - size) * (tokens - self._one.tokens), 1)

    def _planned(self, most_events: int) -> list[tuple[range, _Acts]]:
        """Lists what is replayed of the steps, in ranges within which no block changes its pool or stops growing."""
        steps, borders = self._steps, {self._steps.start, self._steps.stop}
        for birth in self._one.births.values():
            largest = self._size(birth, steps[-1])
            full = largest if self._size(birth, steps[-1] - 1) == largest else 0
            for limit in (SMALL_BYTES + 1, full):
                if self._size(birth, steps[0]) < limit <= largest:
                    at = bisect_left(steps, limit, key=partial(self._size, birth))
                    borders |= {steps[at], min(steps[at] + 1, steps.stop)}
        ranges = [range(*pair) for pair in pairwise(sorted(borders))]
        for with_neighbours in (True, False):
            plan = [(each, self._acts(each, with_neighbours=with_neighbours)) for each in ranges]
            events = sum(len(each) * sum(len(act) for act in acts if isinstance(act, list)) for each, acts in plan)
            if events <= most_events:
                return plan
        stride = -(-events // most_events)
        thinned = ((each[(steps.start - each.start) % stride :: stride], acts) for each, acts in plan)
        return [(each, acts) for each, acts in thinned if each]

    def _acts(self, steps: range, *, with_neighbours: bool) -> _Acts:
        """Lists what is replayed of a step: blocks that outlive it, those of the same pool that are alive at their
        births and frees and, ``with_neighbours``, those that are alive at the births and frees of these, and so on."""
        shape, owners, frees = self._one.shape, self._owners, self._one.frees
        pools: list[_PoolKey | None] = [
            None if birth is None else (self._streams[birth], self._size(birth, steps[0] - before) <= SMALL_BYTES)
            for birth, before in zip(owners, (what == _CARRIED for what in shape), strict=True)
        ]
        replayed = {at for at, birth in enumerate(owners) if birth is not None and birth not in frees}
        borders: dict[_PoolKey | None, list[int]] = {}
        for position in sorted(replayed):
            borders.setdefault(pools[position], []).append(position)
        is_growing = True
        while is_growing:
            is_growing = False
            for birth, free in reversed(frees.items()):
                among = borders.get(pools[birth], [])
                at = bisect_left(among, birth)
                if birth in replayed or at == len(among) or among[at] > free:
                    continue
                replayed |= {birth, free}
                if with_neighbours:
                    insort(among, birth)
                    insort(among, free)
                    is_growing = True
        acts: _Acts = []
        stretches: dict[_PoolKey, Stretch] = {}
        """The stretches to which events can still be added."""
        for position, (what, owner, pool) in enumerate(zip(shape, owners, pools, strict=True)):
            if owner is None or pool is None:
                continue
            event = position + 1 if what == _BIRTH else -(position if what == _CARRIED else owner) - 1
            if position in replayed:
                if acts and isinstance(acts[-1], list):
                    acts[-1].append(event)
                else:
                    acts.append([event])
                if pool in stretches and stretches[pool].is_closed:
                    del stretches[pool]
                continue
            if pool not in stretches:
                acts.append(stretches.setdefault(pool, Stretch(pool)))
            stretches[pool].add(event, max(round_size(self._size(owner, tokens)) for tokens in (steps[0], steps[-1])))
        return acts


def skipped_steps(trace: Trace) -> list[SkippedSteps]:
    """Returns the skipped steps of each generation. Raises ValueError if its rehearsed steps are not alike."""
    marks = [(at, tokens) for at, tokens in trace.marks if isinstance(tokens, int)]
    jumps = [at for at in range(1, len(marks) - 1) if marks[at + 1][1] > marks[at][1] + 1]
    found = []
    for index in jumps:
        (first_at, _), (start, before), (stop, after) = marks[index - 1 : index + 2]
        consecutive = takewhile(lambda pair: pair[1][1] == pair[0][1] + 1, pairwise(marks[index + 1 :]))
        last = [_Step(trace, at, end, tokens) for (at, tokens), (end, _) in consecutive]
        first = _Step(trace, first_at, start, before - 1)
        steps, share = range(before, after), MOST_EVENTS // len(jumps)
        found.append(SkippedSteps(trace, start, stop, steps, first, last, share))
    return found
