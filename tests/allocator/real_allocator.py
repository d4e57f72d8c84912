"""Events played through our simulator, and their answers held against those of torch's compiled allocator.

An event is a line that ``scripts/hollow_cuda/replay.py`` reads (``malloc 3 1048576 0``), and the real answer the
line that it prints. The test of recorded answers uses this, and ``scripts/allocator_parity``, which records them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autotrain_mem.allocator.settings import parse_settings
from autotrain_mem.allocator.simulator import CachingAllocator, OutOfMemory

Answer = dict[str, Any]
"""One of ``region`` and ``offset``, ``oom``, ``segments``; and ``numbers``, the memory_stats() after the event."""

PER_EVENT = (
    *("allocated_bytes.all.current", "reserved_bytes.all.current"),
    *("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free"),
)
"""What a recording keeps of every event; of the last it keeps all."""

BLOCK = ("size", "requested_size", "state")
SEGMENT = ("total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_type", "is_expandable")


def simulated(settings: str, capacity_bytes: int, total_bytes: int, events: Sequence[str]) -> Iterator[Answer]:
    """What our simulator answers; addresses as it gives them, where the real answers say region and offset."""
    allocator = CachingAllocator(capacity_bytes, parse_settings(settings), total_bytes=total_bytes)
    addresses: dict[int, int] = {}
    for event in events:
        yield {**_played(allocator, addresses, *event.split()), "numbers": allocator.memory_stats()}


def _played(allocator: CachingAllocator, addresses: dict[int, int], action: str, *arguments: str) -> Answer:
    match action, [int(number) for number in arguments]:
        case "malloc", [name, requested_bytes, stream]:
            try:
                addresses[name] = allocator.malloc(requested_bytes, stream=stream)
            except OutOfMemory as error:
                return {"oom": str(error)}
            return {"address": addresses[name]}
        case "free", [name]:
            if name in addresses:  # one that was refused is not freed
                allocator.free(addresses.pop(name))
        case "record_stream", [name, stream]:
            if name in addresses:
                allocator.record_stream(addresses[name], stream)
        case "complete_events", []:
            allocator.complete_events()
        case "empty_cache", []:
            allocator.empty_cache()
        case "fraction", [percent]:
            allocator.set_memory_fraction(percent / 100)
        case "snapshot", []:
            return {"segments": allocator.segments()}
        case _:
            raise ValueError(f"no such event: {action} {arguments}")
    return {}


class Comparison:
    """Holds answers against each other, event by event. Keeps where our addresses have the real regions."""

    def __init__(self) -> None:
        self._bases: dict[int, int] = {}
        self.not_simulated: set[str] = set()
        """Numbers that only the real allocator has."""

    def differences(self, event: str, real: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
        """``["reserved_bytes.all.current: 4096, really 2097152"]``; nothing where the two agree."""
        found = [*self._places(real, ours)]
        if "oom" in real and "oom" in ours and real["oom"] != ours["oom"]:
            found.append(f"message {ours['oom']!r}, really {real['oom']!r}")
        if "segments" in real:
            found += self._segments(real["segments"], ours["segments"])
        # What became ready is taken back by the next malloc, not by the event itself.
        if event != "complete_events":
            found += self._numbers(real["numbers"], ours["numbers"])
        self.not_simulated |= real["numbers"].keys() - ours["numbers"].keys()
        return found

    def _places(self, real: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
        if ("region" in real) != ("address" in ours):
            yield f"{'refused' if 'oom' in ours else 'given'}, really {'given' if 'region' in real else 'refused'}"
        elif "region" in real:
            base = ours["address"] - real["offset"]
            known = self._bases.setdefault(real["region"], base)
            if known != base or list(self._bases.values()).count(base) > 1:
                yield f"at {ours['address'] - known:+} of region {real['region']}, really at {real['offset']:+}"

    def _segments(self, real: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        expected = [self._segment(self._bases.get(one["region"], 0) + one["offset"], one) for one in real]
        found = [self._segment(one["address"], one) for one in ours]
        if sorted(expected, key=str) != sorted(found, key=str):
            yield f"segments {[one for one in found if one not in expected]}, really " + str(
                [one for one in expected if one not in found]
            )

    def _segment(self, address: int, segment: Mapping[str, Any]) -> Answer:
        blocks = [
            # What was asked for in a free block is left over from its last use.
            tuple(block[key] if key != "requested_size" or block["state"] != "inactive" else 0 for key in BLOCK)
            for block in segment["blocks"]
        ]
        return {"address": address, **{key: segment[key] for key in SEGMENT}, "blocks": blocks}

    def _numbers(self, real: Mapping[str, int], ours: Mapping[str, int]) -> Iterator[str]:
        for name, value in real.items():
            if ours.get(name, value) != value:
                yield f"{name}: {ours[name]}, really {value}"
