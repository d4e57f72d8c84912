"""Replays a trace through the simulated allocator to find the reserved bytes."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

from autotrain_mem.allocator.blocks import round_size
from autotrain_mem.allocator.segments import OnAction
from autotrain_mem.allocator.settings import AllocatorSettings
from autotrain_mem.allocator.simulator import CachingAllocator, OutOfMemory
from autotrain_mem.estimator.decode_steps import SkippedSteps, skipped_steps
from autotrain_mem.types import CACHE_EMPTIED, ReservedEstimate, StreamUse, Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCapacity:
    """The memory available to the allocator, and its settings."""

    capacity_bytes: int | None
    """The most that can be reserved; None for no limit."""
    total_bytes: int | None = None
    """Bytes of the whole device, to which ``per_process_memory_fraction`` applies; None for ``capacity_bytes``."""
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    """The training process's settings; ``grows`` is chosen separately."""
    caches: bool = True
    """False for the host, which has no caching allocator."""

    @property
    def endless(self) -> "DeviceCapacity":
        """Returns a capacity without a limit, and without settings that free cached blocks early."""
        settings = replace(self.settings, garbage_collection_threshold=0.0, per_process_memory_fraction=1.0)
        return DeviceCapacity(capacity_bytes=None, settings=settings, caches=self.caches)


def reserve(trace: Trace, room: DeviceCapacity, *, grows: bool) -> ReservedEstimate:
    """Replays a run and returns its reserved bytes. If the allocator has to release its cache and retry a request, the
    run counts as not fitting; its peak then comes from a second replay, on an unlimited device."""
    if not room.caches:
        peak = max(allocated_after_each(trace), default=0)
        return ReservedEstimate(peak_allocated_bytes=peak, peak_reserved_bytes=peak, peak_limited_bytes=peak)
    limited = Replay(trace, room, grows=grows)
    limited.run()
    if limited.allocator.num_alloc_retries == 0:
        return limited.estimate()
    unlimited = Replay(trace, room.endless, grows=grows)
    unlimited.run()
    return replace(
        unlimited.estimate(),
        peak_limited_bytes=limited.allocator.peak_reserved_bytes,
        num_alloc_retries=limited.allocator.num_alloc_retries,
        largest_refused_bytes=limited.largest_refused_bytes,
    )


def allocated_after_each(trace: Trace) -> list[int]:
    """Returns the allocated bytes after each event."""
    sizes = [round_size(block.size_bytes) for block in trace.blocks]
    current, sums = 0, []
    for event in trace.events:
        if event > 0:
            current += sizes[event - 1]
        elif event != CACHE_EMPTIED:
            current -= sizes[-event - 1]
        sums.append(current)
    return sums


def held_after_each(trace: Trace, room: DeviceCapacity, *, grows: bool) -> list[tuple[int, int]]:
    """Replays a run and lists (reserved bytes, allocated bytes) after each event; they are equal without a cache."""
    if not room.caches:
        return [(allocated, allocated) for allocated in allocated_after_each(trace)]
    held: list[tuple[int, int]] = []
    replay = Replay(trace, room, grows=grows)
    allocator = replay.allocator

    def events() -> Iterator[int]:
        for event in trace.events:
            yield event  # the replay asks for the next event after this one
            held.append((allocator.reserved_bytes, allocator.allocated_bytes))

    replay.run(events())
    return held


class Replay:
    """Runs a trace through one allocator.

    A refused request is granted by enlarging the device for the rest of the run. Once freed, a block that other streams
    used is available from the next request on, as if these streams had finished.
    """

    def __init__(self, trace: Trace, room: DeviceCapacity, *, grows: bool, on_action: OnAction | None = None) -> None:
        self._trace = trace
        self.requests = [(block.size_bytes, block.stream) for block in trace.blocks]
        self.addresses = [0] * len(trace.blocks)
        settings = replace(room.settings, grows=grows)
        self.allocator = CachingAllocator(
            room.capacity_bytes, settings, total_bytes=room.total_bytes, on_action=on_action
        )
        self.largest_refused_bytes: int | None = None
        self._slack_bytes = 0

    def estimate(self) -> ReservedEstimate:
        """Returns the peaks of the run."""
        return ReservedEstimate(
            peak_allocated_bytes=self.allocator.peak_allocated_bytes,
            peak_reserved_bytes=self.allocator.peak_reserved_bytes,
            peak_limited_bytes=self.allocator.peak_reserved_bytes,
            slack_bytes=self._slack_bytes,
            num_alloc_retries=self.allocator.num_alloc_retries,
            largest_refused_bytes=self.largest_refused_bytes,
        )

    def run(self, events: Iterable[int] | None = None) -> None:
        """Replays all events. A caller can pass its own iterator over the trace's events, to act between them."""
        coming, passed = iter(self._trace.events if events is None else events), 0
        acts: list[StreamUse | SkippedSteps] = [*self._trace.stream_uses]
        with suppress(ValueError):  # ``estimate_memory`` reports it
            acts += skipped_steps(self._trace)
        for act in sorted(acts, key=lambda act: act.event if isinstance(act, StreamUse) else act.start):
            if isinstance(act, StreamUse):
                self._play(islice(coming, act.event - passed))
                passed = act.event
                self.allocator.record_stream(self.addresses[act.block - 1], act.stream)
            else:
                self._play(islice(coming, act.start - passed))
                deque(islice(coming, act.stop - act.start), maxlen=0)
                passed = act.stop
                self._play(act.events(self))
        self._play(coming)

    def _play(self, events: Iterable[int]) -> None:
        allocator, addresses, requests = self.allocator, self.addresses, self.requests
        malloc, free = allocator.malloc, allocator.free
        peak, has_other_streams = allocator.peak_reserved_bytes, bool(self._trace.stream_uses)
        for event in events:
            if event > 0:
                try:
                    addresses[event - 1] = malloc(*requests[event - 1])
                except OutOfMemory as error:
                    addresses[event - 1] = self._grow(error, *requests[event - 1])
                if allocator.peak_reserved_bytes > peak:
                    peak = allocator.peak_reserved_bytes
                    self._slack_bytes = allocator.reserved_bytes - allocator.allocated_bytes
            elif event == CACHE_EMPTIED:
                allocator.empty_cache()
            else:
                free(addresses[-event - 1])
                if has_other_streams:
                    allocator.complete_events()

    def _grow(self, error: OutOfMemory, size_bytes: int, stream: int) -> int:
        self.largest_refused_bytes = max(self.largest_refused_bytes or 0, error.refusal.requested_bytes)
        allocator, device = self.allocator, self.allocator.device
        taken, capacity, allowed = device.taken_bytes, device.capacity_bytes, allocator.allowed_bytes
        device.capacity_bytes = allocator.allowed_bytes = None
        address = allocator.malloc(size_bytes, stream)
        grown = device.taken_bytes - taken  # whole pages, so possibly more than requested
        device.capacity_bytes = None if capacity is None else capacity + grown
        allocator.allowed_bytes = None if allowed is None else allowed + grown
        return address
