"""Samples a rehearsal's memory over its events: bytes by owner, and reserved bytes."""

import heapq

from autotrain_mem.allocator.blocks import round_size
from autotrain_mem.estimator.replay import DeviceCapacity, allocated_after_each, held_after_each
from autotrain_mem.types import CACHE_EMPTIED, Holder, Owner, Timeline, Trace

PLACES = 1000
"""Number of intervals that the events are divided into: about as many as a figure has pixels."""
HOLDERS = 5
"""Number of the largest (owner, module) pairs listed at each point."""
STACKED = tuple(Owner)
"""The order of the stack, from the bottom."""


def make_timeline(trace: Trace, room: DeviceCapacity, *, grows: bool, name: str, places: int = PLACES) -> Timeline:
    """Replays a run and records the bytes of each owner at selected events.

    Each of ``places`` intervals keeps its lowest and highest point, and the one with most reserved bytes. Raises
    ValueError for a trace without events.
    """
    if not trace.events:
        raise ValueError("the trace is empty: nothing was allocated while the trainer was rehearsed")
    reserved = [each for each, _ in held_after_each(trace, room, grows=grows)]
    allocated = allocated_after_each(trace)
    count = len(allocated)
    chosen = {0, count - 1} if count > 3 * places else {*range(count)}
    for place in range(places if count > 3 * places else 0):
        stretch = range(place * count // places, (place + 1) * count // places)
        chosen |= {min(stretch, key=allocated.__getitem__), max(stretch, key=allocated.__getitem__)}
        chosen.add(max(stretch, key=reserved.__getitem__))
    shown = sorted(chosen)
    columns: dict[Owner, list[int]] = {owner: [] for owner in STACKED}
    held: dict[tuple[Owner, str], int] = {}
    largest: list[list[tuple[int, tuple[Owner, str]]]] = []
    points = set(shown)
    for index, event in enumerate(trace.events):
        if event != CACHE_EMPTIED:
            block = trace.blocks[abs(event) - 1]
            key = block.owner, block.module
            held[key] = held.get(key, 0) + round_size(block.size_bytes) * (1 if event > 0 else -1)
            if not held[key]:
                del held[key]
        if index in points:
            totals = dict.fromkeys(STACKED, 0)
            for (owner, _), size_bytes in held.items():
                totals[owner] += size_bytes
            for owner, column in columns.items():
                column.append(totals[owner])
            largest.append(heapq.nsmallest(HOLDERS, ((-size_bytes, key) for key, size_bytes in held.items())))
    owners = {owner: tuple(column) for owner, column in columns.items() if any(column)}
    owner_numbers = {owner: number for number, owner in enumerate(owners)}
    modules = sorted({module for point in largest for _, (_, module) in point})
    module_numbers = {module: number for number, module in enumerate(modules)}
    return Timeline(
        name=name,
        events=len(trace.events),
        event=tuple(shown),
        owners=owners,
        reserved_bytes=tuple(reserved[index] for index in shown),
        modules=tuple(modules),
        holders=tuple(
            tuple(
                Holder(module=module_numbers[module], owner=owner_numbers[owner], size_bytes=-negative)
                for negative, (owner, module) in point
            )
            for point in largest
        ),
        phases=tuple((phase, start) for start, phase in trace.phase_starts),
        peak=max(range(len(shown)), key=lambda point: allocated[shown[point]]),
        budget_bytes=room.capacity_bytes or 0,
    )
