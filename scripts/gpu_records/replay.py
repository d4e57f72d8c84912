"""Replays a recorded history through the simulated allocator: the same requests must produce the same segments.

Only a program's requests are replayed: allocations, frees, and emptied caches. The segments that the real allocator
requested from and released to the device are compared, in order, with those of the simulator.

A block is freed at ``free_completed``: right after ``free_requested``, or later if another stream still used it. An
emptied cache is recognised by the released segments; one that released none changed nothing. If memory ran out
(``num_alloc_retries``), the allocator emptied the cache itself; this is replayed in the same way.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, zip_longest

from autotrain_mem.allocator.settings import parse_settings
from autotrain_mem.allocator.simulator import CachingAllocator
from gpu_records.history import GROWS, SHRINKS, Event, History


@dataclass(frozen=True, slots=True)
class Change:
    """One request of the allocator to the device: one growth, or consecutive releases."""

    event: int
    """Index in the history of the program's request that caused it."""
    sizes: tuple[int, ...]
    """Bytes: positive if requested, negative if released. Releases are sorted, since their order does not matter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    recorded_peak_bytes: int
    """Peak of reserved bytes, summed from the recorded segments."""
    simulated_peak_bytes: int
    segments: int
    """The number of changes that the real allocator requested from the device."""
    divergence: str
    """Describes the first difference; empty if there is none."""
    strangers: int
    """Blocks freed that were allocated before the history began."""


def replay(history: History, allocator: str) -> Replay:
    """Replays a history in a simulator with these settings (PYTORCH_ALLOC_CONF)."""
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
    """Yields every event with the index of the request that caused it: new segments are recorded before their
    allocation, so they get its index.
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
