"""Draws a rehearsal's memory over its events: what each owner holds and what is reserved, thinned without losing a
peak."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from autotrain_mem.allocator.blocks import round_size
from autotrain_mem.estimator.replay import DeviceCapacity, allocated_after_each, held_after_each
from autotrain_mem.types import Owner, Trace
from autotrain_mem.types.page import Holder, Timeline
from autotrain_mem.types.trace import CACHE_EMPTIED

PLACES = 1000
"""The number of points on the screen: about as many as a figure has pixels."""
HOLDERS = 5
"""Modules named at each point: those that hold the most there, for one owner each."""
STACKED = tuple(Owner)
"""The order of the stack from the bottom: what stays for the whole run first."""


def make_timeline(trace: Trace, room: DeviceCapacity, *, grows: bool, name: str, places: int = PLACES) -> Timeline:
    """Replays a run and records what each owner holds at every point that is shown.

    The events are divided into ``places``, each of which keeps its lowest and highest moment, and the one that reserved
    most. Raises ValueError for a trace without events.
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
    owners, largest = _gather(trace, shown)
    owner_numbers = {owner: number for number, owner in enumerate(owners)}
    modules = sorted({module for point in largest.points for _, module, _ in point})
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
                Holder(module=module_numbers[module], owner=owner_numbers[owner], size_bytes=size_bytes)
                for owner, module, size_bytes in point
            )
            for point in largest.points
        ),
        phases=tuple((phase, start) for start, phase in trace.phase_starts),
        peak=max(range(len(shown)), key=lambda point: allocated[shown[point]]),
        budget_bytes=room.capacity_bytes or 0,
    )


def _gather(trace: Trace, shown: Sequence[int]) -> tuple[dict[Owner, tuple[int, ...]], _Largest]:
    """Goes through the run once more, and records what each owner and the largest holders have at the points."""
    totals = dict.fromkeys(STACKED, 0)
    columns: dict[Owner, list[int]] = {owner: [] for owner in STACKED}
    largest = _Largest()
    points = iter((*shown, len(trace.events)))
    following = next(points)
    for index, event in enumerate(trace.events):
        if event != CACHE_EMPTIED:
            block = trace.blocks[abs(event) - 1]
            change = round_size(block.size_bytes) * (1 if event > 0 else -1)
            totals[block.owner] += change
            largest.change(block.owner, block.module, change)
        if index == following:
            for owner, column in columns.items():
                column.append(totals[owner])
            largest.take_down()
            following = next(points)
    return {owner: tuple(column) for owner, column in columns.items() if any(column)}, largest


class _Largest:
    """Keeps what each module holds for each owner, and records the largest of them.

    A heap holds every past total; a stale one is dropped when it comes up, so that a run of n events costs n log n
    however many points are recorded.
    """

    def __init__(self) -> None:
        self.points: list[list[tuple[Owner, str, int]]] = []
        self._totals: dict[tuple[Owner, str], int] = {}
        self._heap: list[tuple[int, tuple[Owner, str]]] = []

    def change(self, owner: Owner, module: str, size_bytes: int) -> None:
        key = (owner, module)
        self._totals[key] = total = self._totals.get(key, 0) + size_bytes
        if total > 0:
            heapq.heappush(self._heap, (-total, key))

    def take_down(self) -> None:
        """Returns the modules that hold most at this point, largest first."""
        top: list[tuple[int, tuple[Owner, str]]] = []
        while self._heap and len(top) < HOLDERS:
            entry = heapq.heappop(self._heap)
            if self._totals[entry[1]] == -entry[0] and entry not in top:
                top.append(entry)
        for entry in top:
            heapq.heappush(self._heap, entry)
        self.points.append([(owner, module, -total) for total, (owner, module) in top])
