"""Records the blocks of a run, their births and deaths, and the run's phases; holds no tensors."""

import time
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autotrain_mem.machine.simulated_card import SimulatedGpu
from autotrain_mem.types import CACHE_EMPTIED, Block, EngineMark, Owner, Phase, StreamUse, Trace, Workload
from autotrain_mem.types.trace import LossPass

_NO_WORK = Workload()


@dataclass(slots=True)
class _Entry:
    """Describes one block, except its size. ``born_in`` and ``died_in`` number stretches of the run: a stretch is a
    phase, or a part of a backward pass with grad mode on or off."""

    name: str
    phase: Phase
    born_in: int
    with_grad: bool
    stream: int
    owner: Owner | None = None
    died_in: int | None = None


class Ledger:
    """Records one run. Blocks are numbered from 0. A simulated card gets every allocation and free as it happens; its
    out-of-memory errors reach the caller."""

    def __init__(self, device: SimulatedGpu | None = None) -> None:
        self.phase = Phase.LOAD
        self.operators = 0
        self.stream = 0
        """Stream of the next block; 0 is the default stream."""
        self.events: array[int] = array("q")
        """As in a trace: ``+n`` is the birth and ``-n`` the death of block ``n - 1``."""
        self.sizes: list[int] = []
        self._device = device
        self._entries: list[_Entry] = []
        self._disowned: set[int] = set()
        self._stream_uses: list[tuple[int, int, int]] = []
        self._phase_starts: list[tuple[int, Phase]] = [(0, Phase.LOAD)]
        self._marks: list[tuple[int, EngineMark | int]] = []
        self._loss_passes: list[LossPass] = []
        self._stretch = 0
        self._grad_enabled = True
        self._started = time.perf_counter()

    def enter_phase(self, phase: Phase) -> None:
        self.phase = phase
        self._stretch += 1
        self._phase_starts.append((len(self.events), phase))

    def mark(self, mark: EngineMark | int) -> None:
        """Records that a colocated vLLM engine takes or releases its share of the device, or that ``generate()`` has
        this many tokens in its rows and begins the next decode step."""
        self._marks.append((len(self.events), mark))

    def write_birth(self, size_bytes: int, name: str, *, grad_enabled: bool = True) -> int:
        """Adds a block and returns its number; :meth:`allocate` then allocates it on the device."""
        block = len(self.sizes)
        if grad_enabled is not self._grad_enabled:
            self._grad_enabled = grad_enabled
            # In a backward pass grad mode is on only while a checkpoint recomputes its forward.
            self._stretch += self.phase is Phase.BACKWARD
        self.sizes.append(size_bytes)
        self._entries.append(_Entry(name, self.phase, self._stretch, grad_enabled, self.stream))
        self.events.append(block + 1)
        return block

    def write_unseen(self, size_bytes: int) -> int:
        """Returns a block number for memory that is not on the device; it gets no events."""
        block = len(self.sizes)
        self.sizes.append(size_bytes)
        self._entries.append(_Entry("", self.phase, self._stretch, self._grad_enabled, self.stream))
        self._disowned.add(block)
        return block

    def allocate(self, block: int) -> None:
        if self._device is not None:
            self._device.allocate(block, self.sizes[block], self._entries[block].stream)

    def end(self, block: int) -> None:
        self._entries[block].died_in = self._stretch
        self.events.append(-block - 1)
        if self._device is not None:
            self._device.free(block)

    def describe(self, block: int, owner: Owner, name: str) -> None:
        entry = self._entries[block]
        entry.owner, entry.name = owner, name

    def describe_as(self, block: int, other: int) -> None:
        """Copies the owner and name of another block."""
        source = self._entries[other]
        self._entries[block].owner, self._entries[block].name = source.owner, source.name

    def describe_unowned(self, first: int, owner: Owner, name: str) -> None:
        """Sets the owner and name of the blocks from ``first`` on that have no owner."""
        for entry in self._entries[first:]:
            if entry.owner is None:
                entry.owner, entry.name = owner, name

    def disown(self, block: int) -> None:
        if block in self._disowned:
            return
        self._disowned.add(block)
        if self._device is not None:
            self._device.free(block)

    def is_disowned(self, block: int) -> bool:
        return block in self._disowned

    def empty_cache(self) -> None:
        self.events.append(CACHE_EMPTIED)
        if self._device is not None:
            self._device.empty_cache()

    def use_on_stream(self, block: int, stream: int) -> None:
        """Records a use on another stream than the block's own (``CUDACachingAllocator.cpp: recordStream``)."""
        if stream == self._entries[block].stream:
            return
        self._stream_uses.append((len(self.events), block, stream))
        if self._device is not None:
            self._device.record_stream(block, stream)

    def add_loss_pass(self, start: int, chunks: int, operators: int) -> None:
        """Records a pass over the chunks of a loss, from event ``start`` to the latest event."""
        self._loss_passes.append(LossPass(start, len(self.events), chunks, operators))

    def births(self) -> list[tuple[int, bool, Owner | None]]:
        """Lists each block's bytes, whether grad mode was on when it was allocated, and its owner."""
        return [(size, one.with_grad, one.owner) for size, one in zip(self.sizes, self._entries, strict=True)]

    def owned(self, blocks: Iterable[int]) -> dict[Owner, int]:
        """Returns the bytes of these blocks by owner, as known so far."""
        found: Counter[Owner] = Counter()
        for block in blocks:
            found[self._owner(block)] += self.sizes[block]
        return found

    def trace(self, not_counted: tuple[str, ...] = (), work: Workload = _NO_WORK) -> Trace:
        """Returns the trace of the run so far, without disowned blocks."""
        kept = [block for block in range(len(self.sizes)) if block not in self._disowned]
        number = {block: index for index, block in enumerate(kept, start=1)}
        events, moved = array("q"), array("q", [0])  # moved maps an index of self.events to one of the trace's events
        for event in self.events:
            block = abs(event) - 1
            if event == CACHE_EMPTIED:
                events.append(CACHE_EMPTIED)
            elif block in number:
                events.append(number[block] if event > 0 else -number[block])
            moved.append(len(events))
        entries = ((block, self._entries[block]) for block in kept)
        return Trace(
            blocks=tuple(
                Block(size_bytes=self.sizes[block], owner=self._owner(block), module=entry.name, stream=entry.stream)
                for block, entry in entries
            ),
            events=events,
            phase_starts=tuple((moved[at], phase) for at, phase in self._phase_starts),
            marks=tuple((moved[at], mark) for at, mark in self._marks),
            stream_uses=tuple(
                StreamUse(moved[at], number[block], stream)
                for at, block, stream in self._stream_uses
                if block in number
            ),
            operators=self.operators,
            seconds=time.perf_counter() - self._started,
            not_counted=not_counted,
            work=work,
            loss_passes=tuple(one._replace(start=moved[one.start], stop=moved[one.stop]) for one in self._loss_passes),
        )

    def _owner(self, block: int) -> Owner:
        """Returns a marked block's owner. An unmarked block from loading is OTHER; one that outlives its stretch of a
        forward pass or a recomputation is an activation; any other is a temporary."""
        entry = self._entries[block]
        if entry.owner is not None:
            return entry.owner
        if entry.phase is Phase.LOAD:
            return Owner.OTHER
        outlived = entry.died_in != entry.born_in
        made_by_forward = entry.phase is Phase.FORWARD or (entry.phase is Phase.BACKWARD and entry.with_grad)
        return Owner.ACTIVATIONS if made_by_forward and outlived else Owner.TEMPORARY


class PinnedMemory:
    """Counts one process's pinned host memory (``aten/src/ATen/core/CachingHostAllocator.h: get_free_block``).

    Each tensor takes a block, rounded up to a power of two: 14.7 MB take 16.8 MB. A freed block stays with the process
    and serves only requests of its own size. The option ``pinned_max_round_threshold_mb`` of newer torch is ignored.
    """

    def __init__(self) -> None:
        self._alive: Counter[int] = Counter()
        self._most: Counter[int] = Counter()
        self._kept_bytes = 0

    def take(self, holder: object, size_bytes: int) -> None:
        """Counts a tensor that lives as long as ``holder``."""
        block = block_bytes(size_bytes)
        self._alive[block] += 1
        self._most[block] = max(self._most[block], self._alive[block])
        weakref.finalize(holder, self._alive.subtract, [block])

    def keep(self, sizes: Iterable[int]) -> None:
        """Counts tensors of these sizes as permanent; each call replaces the previous one."""
        self._kept_bytes = sum(map(block_bytes, sizes))

    @property
    def peak_bytes(self) -> int:
        return self._kept_bytes + sum(block * count for block, count in self._most.items())


class UnpinnedMemory:
    """Counts one process's unpinned host memory."""

    def __init__(self) -> None:
        self._alive_bytes = self.peak_bytes = 0

    def take(self, holder: object, size_bytes: int) -> Callable[[], object]:
        """Counts a tensor that lives as long as ``holder``; returns a function that removes it earlier."""
        self._alive_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self._alive_bytes)
        return weakref.finalize(holder, self._give_back, size_bytes)

    def _give_back(self, size_bytes: int) -> None:
        self._alive_bytes -= size_bytes


def block_bytes(size_bytes: int) -> int:
    """Rounds up to a power of two (``c10/util/llvmMathExtras.h: PowerOf2Ceil``); 0 stays 0."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0
