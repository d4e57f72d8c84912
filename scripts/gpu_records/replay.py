"""A recorded history through the simulator of the allocator: the same requests must make the same segments.

Only what a program asks is fed in: allocations, the ends of blocks, and emptied caches. What the real allocator asked
of the device in between is compared, in order, with what the simulator asks.

A block ends where the history says ``free_completed``: right after ``free_requested``, or later where another stream
still used it. An emptied cache is seen by the segments that it gave back; one that gave none back changed nothing.
Where memory ran out (``num_alloc_retries``) the allocator emptied it by itself, which is fed in all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, zip_longest

from autotrain_mem.allocator.settings import parse_settings
from autotrain_mem.allocator.simulator import CachingAllocator
from gpu_records.history import GROWS, SHRINKS, Event, History


@dataclass(frozen=True, slots=True)
class Change:
    """What the allocator asked of the device at one time: one growth, or all that it gave back together."""

    event: int
    """Index in the history of the request that it belongs to."""
    sizes: tuple[int, ...]
    """Positive for memory taken, negative for memory given back, smallest first: that order is the allocator's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    recorded_peak_bytes: int
    """Of reserved bytes, by the history's own segments."""
    simulated_peak_bytes: int
    segments: int
    """Times that the real allocator asked something of the device."""
    divergence: str
    """The first place where the two part; empty when they never do."""
    strangers: int
    """Blocks freed that were allocated before the history began."""


def replay(history: History, allocator: str) -> Replay:
    """Feed a history to a simulator with these settings (PYTORCH_ALLOC_CONF)."""
    told: list[tuple[int, str, int]] = []
    now = 0
    simulator = CachingAllocator(
        None,
        parse_settings(allocator),
        on_action=lambda action, address, size, stream: told.append((now, action, size)),
    )
    addresses: dict[int, int] = {}
    strangers, emptying = 0, False
    for now, event in enumerate(history):  # noqa: B007  # ``told`` reads it
        if event.action == "alloc":
            addresses[event.address] = simulator.malloc(event.size_bytes, event.stream)
        elif event.action == "free_completed":
            address = addresses.pop(event.address, None)
            strangers += address is None
            if address is not None:
                simulator.free(address)
        elif event.action in SHRINKS and not emptying:
            simulator.empty_cache()
        emptying = event.action in SHRINKS
    recorded = list(_changes((index, event.action, event.size_bytes) for index, event in _requests(history)))
    simulated = list(_changes(told))
    divergence = ""
    for number, (theirs, ours) in enumerate(zip_longest(recorded, simulated)):
        if ours != theirs:
            divergence = f"change {number}: recorded {_words(theirs)}, simulated {_words(ours)}"
            break
    signs = dict.fromkeys(GROWS, 1) | dict.fromkeys(SHRINKS, -1)
    reserved = accumulate(signs.get(event.action, 0) * event.size_bytes for event in history)
    return Replay(
        recorded_peak_bytes=max(reserved, default=0),
        simulated_peak_bytes=simulator.peak_reserved_bytes,
        segments=len(recorded),
        divergence=divergence,
        strangers=strangers,
    )


def _requests(history: History) -> Iterator[tuple[int, Event]]:
    """Every event with the index of the request that it belongs to: segments come before their allocation, and
    before the first of those given back the cache is emptied.
    """
    waiting: list[Event] = []
    for index, event in enumerate(history):
        if event.action in GROWS:
            waiting.append(event)
            continue
        yield from ((index, grown) for grown in waiting)
        waiting = []
        yield index, event
    yield from ((len(history), grown) for grown in waiting)


def _changes(events: Iterable[tuple[int, str, int]]) -> Iterator[Change]:
    signed = (
        (index, action in GROWS, size if action in GROWS else -size)
        for index, action, size in events
        if action in GROWS or action in SHRINKS
    )
    for grows, together in groupby(signed, key=lambda change: change[1]):
        changes = list(together)
        if grows:
            for index, one in groupby(changes, key=lambda change: change[0]):
                yield Change(index, tuple(size for _, _, size in one))
        else:
            yield Change(changes[0][0], tuple(sorted(size for _, _, size in changes)))


def _words(change: Change | None) -> str:
    if change is None:
        return "nothing more"
    return f"{', '.join(f'{size:+,}' for size in change.sizes)} at event {change.event}"
