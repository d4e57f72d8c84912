"""A real run's peak and a rehearsal's, block by block, and both sequences of allocations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from gpu_records.history import History
from gpu_records.native import apart
from gpu_records.record import Record
from gpu_records.sequences import any_layer, births_of_trace, chosen, differences, summary

from autotrain_mem.allocator.blocks import round_size
from autotrain_mem.allocator.settings import AllocatorSettings
from autotrain_mem.estimator.replay import DeviceCapacity, Replay
from autotrain_mem.support.units import MIB
from autotrain_mem.types import Trace
from hollow_cuda.frames import Frames

SMALLEST_BYTES = 64 << 10
"""Of sequences, smaller allocations are left out: there are many, and they move no peak."""
SHOWN_FRAMES = 10


@dataclass(frozen=True, slots=True)
class Compared:
    """Peaks of a whole run, and what was predicted of them in the run's own allocator mode; 0.01 is 1 % too much."""

    allocated_bytes: int
    predicted_allocated_bytes: int
    reserved_bytes: int
    predicted_reserved_bytes: int

    @property
    def allocated_error(self) -> float:
        return self.predicted_allocated_bytes / self.allocated_bytes - 1

    @property
    def reserved_error(self) -> float:
        return self.predicted_reserved_bytes / self.reserved_bytes - 1


def compared(record: Record, trace: Trace) -> Compared:
    """Allocated as torch counts it: a block that is larger than asked for, and is not split, counts whole."""
    settings = AllocatorSettings(grows=record.case.knobs.expandable_segments)
    replay = Replay(trace, settings, DeviceCapacity(capacity_bytes=None))
    replay.run()
    real, ours = record.trained, replay.allocator
    return Compared(
        real.peak_allocated_bytes, ours.peak_allocated_bytes, real.peak_reserved_bytes, ours.peak_reserved_bytes
    )


def peak_differences(record: Record, trace: Trace, folder: Path, most: int) -> Iterator[str]:
    """Lines: of which sizes more or fewer blocks live at the real peak than at the rehearsed one, largest sum first."""
    frames = Frames.read(folder, record.case.name)
    real, ours = _live_at_real_peak(record.history), _live_at_our_peak(trace)
    sizes = sorted(set(real) | set(ours), key=lambda size: -abs(len(ours[size]) - len(real[size])) * size)
    for size in sizes[:most]:
        more = len(ours[size]) - len(real[size])
        if not more:
            break
        counts = f"{len(ours[size])} rehearsed, {len(real[size])} real"
        yield f"{size / MIB:10.3f} MiB: {counts}, {more * size / MIB:+.1f} MiB"
        for owner, count in Counter(ours[size]).most_common(2):
            yield f"           rehearsed {count} x {owner}"
        for told, count in Counter("\n".join(frames.at(event)) for event in real[size]).most_common(2):
            yield f"           real {count} x"
            yield from (f"               {line}" for line in told.splitlines()[:SHOWN_FRAMES])


def _live_at_real_peak(history: History) -> dict[int, list[int]]:
    """Indices of the allocations that live there, by rounded size."""
    live: dict[int, tuple[int, int]] = {}
    at_peak: dict[int, tuple[int, int]] = {}
    current = peak = 0
    grown = False
    for index, event in enumerate(history):
        if event.action == "alloc":
            live[event.address] = (index, round_size(event.size_bytes))
            current += round_size(event.size_bytes)
            grown = grown or current > peak
            peak = max(peak, current)
        elif event.action == "free_completed" and event.address in live:
            if grown:  # the first end after a peak: what lives now lived then
                at_peak, grown = dict(live), False
            current -= live.pop(event.address)[1]
    found: dict[int, list[int]] = defaultdict(list)
    for index, size in (dict(live) if grown else at_peak).values():
        found[size].append(index)
    return found


def _live_at_our_peak(trace: Trace) -> dict[int, list[str]]:
    """Owner and module of the blocks that live there, by rounded size."""
    current = peak = at = 0
    births = list(filter(None, trace.events))
    for index, number in enumerate(births):
        current += (1 if number > 0 else -1) * round_size(trace.blocks[abs(number) - 1].size_bytes)
        if current > peak:
            peak, at = current, index
    live: dict[int, None] = {}
    for number in islice(births, at + 1):
        if number > 0:
            live[number] = None
        else:
            del live[-number]
    found: dict[int, list[str]] = defaultdict(list)
    for number in live:
        block = trace.blocks[number - 1]
        found[round_size(block.size_bytes)].append(f"{block.owner.value} {any_layer(block.module)}".rstrip())
    return found


def sequence_differences(record: Record, trace: Trace, folder: Path, most: int) -> Iterator[str]:
    """Lines: what only one of the two sequences of allocations has, and the real one's line; loading left out."""
    frames = Frames.read(folder, record.case.name)
    left_out = apart(record.case)
    asked = ((index, event) for index, event in enumerate(record.history) if event.action == "alloc")
    labelled = ((event.size_bytes, f"{event.label} [{'; '.join(frames.at(index)[:2])}]") for index, event in asked)
    real = chosen(labelled, left_out, SMALLEST_BYTES)
    ours = births_of_trace(trace, left_out, SMALLEST_BYTES)
    found = differences(real, ours)
    counts = f"{len(real)} real, {len(ours)} rehearsed allocations"
    yield f"{counts} from {SMALLEST_BYTES >> 10} KiB on, {len(found)} differences"
    yield from summary(found, ("real", "rehearsed"), most)
