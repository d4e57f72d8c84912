"""Stores torch's memory history in compact columns: requests to the allocator, and its own requests to the device.

An entry of ``torch.cuda.memory._snapshot()["device_traces"]`` is a dict of some 300 bytes; here it takes 21. Sizes of
``alloc`` and ``free_*`` are as requested, before rounding; those of segments are full sizes
(``c10/cuda/CUDACachingAllocator.cpp: record_trace``).
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

from autotrain_mem.types.trace import Events

ACTIONS = (
    *("alloc", "free_requested", "free_completed"),
    *("segment_alloc", "segment_free", "segment_map", "segment_unmap"),
    "oom",
)
GROWS, SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
UNKNOWN_ADDRESS = -1
LOADING, OTHER_THREAD = "load", "backward"
"""Labels for events that have none, because labels are set per thread. Several threads load weights; afterwards,
autograd's thread is the only other one that allocates."""


@dataclass(frozen=True, slots=True)
class Event:
    action: str
    address: int
    size_bytes: int
    stream: int
    label: str
    """``phase module``, or just the phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """All events, in order. Addresses, streams and labels are numbered by their first occurrence."""

    actions: Events
    places: Events
    sizes: Events
    streams: Events
    labels: Events
    addresses: tuple[int, ...]
    stream_names: tuple[int, ...]
    label_names: tuple[str, ...]

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """Builds the columns. Other events, such as ``snapshot``, are left out."""
        places, streams, labels = (defaultdict[Any, int](count().__next__) for _ in range(3))
        columns: list[array[int]] = [array(code) for code in "biqii"]
        for event in events:
            if event.action in ACTIONS:
                row = (ACTIONS.index(event.action), places[event.address], event.size_bytes)
                for column, value in zip(columns, (*row, streams[event.stream], labels[event.label]), strict=True):
                    column.append(value)
        actions, numbers, sizes, stream_numbers, label_numbers = columns
        return cls(
            actions=actions,
            places=numbers,
            sizes=sizes,
            streams=stream_numbers,
            labels=label_numbers,
            addresses=tuple(places),
            stream_names=tuple(streams),
            label_names=tuple(labels),
        )

    @classmethod
    def of_trace(cls, entries: Iterable[Mapping[str, Any]]) -> Self:
        """Builds a history from one device's list in ``_snapshot()["device_traces"]``. An ``oom`` has no address."""
        events, otherwise = list[Event](), LOADING
        for entry in entries:
            label, address = entry.get("user_metadata", ""), entry.get("addr", UNKNOWN_ADDRESS)
            if label and label != LOADING:
                otherwise = OTHER_THREAD
            events.append(Event(entry["action"], address, entry["size"], entry["stream"], label or otherwise))
        return cls.of(events)

    def __len__(self) -> int:
        return len(self.actions)

    def __iter__(self) -> Iterator[Event]:
        columns = (self.actions, self.places, self.sizes, self.streams, self.labels)
        for action, place, size, stream, label in zip(*columns, strict=True):
            yield Event(
                ACTIONS[action], self.addresses[place], size, self.stream_names[stream], self.label_names[label]
            )
