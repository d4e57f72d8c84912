"""What a run reserves, in both modes and under the user's settings; its peak, and to whom the bytes at it belong."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import block, run_of, trace, traces

from autotrain_mem.allocator.blocks import round_size
from autotrain_mem.allocator.settings import parse_settings
from autotrain_mem.allocator.simulator import CachingAllocator
from autotrain_mem.estimator.memory import LARGEST_MODULES, estimate_memory
from autotrain_mem.estimator.replay import DeviceCapacity, reserve
from autotrain_mem.estimator.timeline import HOLDERS, make_timeline
from autotrain_mem.support.units import MIB
from autotrain_mem.types import MemoryEstimate, Owner, Phase, Trace
from autotrain_mem.types.page import Timeline
from autotrain_mem.types.trace import CACHE_EMPTIED

LARGE_RUNS = traces(largest=48 * MIB, empties=True)


def room(capacity_mib: int | None = None, settings: str = "", total_mib: int | None = None) -> DeviceCapacity:
    capacity, total = (None if each is None else each * MIB for each in (capacity_mib, total_mib))
    return DeviceCapacity(capacity_bytes=capacity, total_bytes=total, settings=parse_settings(settings))


native = partial(reserve, grows=False)


@given(LARGE_RUNS, st.booleans(), st.sampled_from(("", "max_split_size_mb:20", "roundup_power2_divisions:4")))
def test_a_replay_is_what_the_allocator_does_with_the_same_calls(run: Trace, grows: bool, text: str) -> None:
    allocator = CachingAllocator(None, replace(parse_settings(text), grows=grows))
    addresses: dict[int, int] = {}
    for event in run.events:
        if event > 0:
            addresses[event] = allocator.malloc(run.blocks[event - 1].size_bytes)
        elif event == CACHE_EMPTIED:
            allocator.empty_cache()
        else:
            allocator.free(addresses.pop(-event))
    replayed = reserve(run, room(settings=text), grows=grows)
    assert replayed.peak_reserved_bytes == allocator.peak_reserved_bytes
    assert (replayed.num_alloc_retries, replayed.largest_refused_bytes) == (0, None)
    assert replayed.fits


def test_slack_is_what_was_not_allocated_when_the_peak_was_first_reached() -> None:
    run = run_of([40, 4, 60, 90], [1, 2, -1, 3, -3, -2, 4])
    reserved = native(run, room())
    assert reserved.peak_reserved_bytes == (40 + 20 + 60 + 90) * MIB
    assert reserved.slack_bytes == (40 + 20 + 60) * MIB
    assert native(run_of([40, 4], [1, -1, 2]), room()).slack_bytes == 0  # the 40 were, though they serve the 4 later


HALF = "per_process_memory_fraction:0.5"


def test_retries_and_refusals_are_counted() -> None:
    for run, within, retries, refused_mib, needed_mib in (
        # 70 are served by the cached 80.
        (run_of([60, 80, 70, 90], [1, -1, 2, -2, 3, -3, 4]), room(100), 2, None, 60 + 80 + 90),
        # The largest that is refused counts as it was asked; then 52 are cached, which serve the last.
        (run_of([60, 50.5, 70.25, 45], [1, 2, 3, -2, 4]), room(100), 2, 70.25, 60 + 52 + 72),
        # A refused request takes no part of what is left for others.
        (run_of([60, 50, 40], [1, 2, 3]), room(100), 1, 50, 150),
        (run_of([1, 2], [1, 2]), room(0), 2, 2, 2 + 20),
        # One beyond the whole device does not end the run; the mode is the call's, whatever the settings say.
        (run_of([1, 700], [1, 2]), room(100, "expandable_segments:True"), 1, 700, 702),
        # A limit on the process counts, and what is needed is told without it.
        (run_of([40, 30], [1, 2]), room(100, HALF, total_mib=120), 1, 30, 70),
    ):
        reserved = native(run, within)
        assert (reserved.num_alloc_retries, reserved.peak_reserved_bytes) == (retries, needed_mib * MIB)
        assert reserved.largest_refused_bytes == (refused_mib and int(refused_mib * MIB))
        assert not reserved.fits


def test_pages_that_exceed_a_request_that_was_refused_do_not_end_the_run() -> None:
    """11 MiB find 5 mapped and 5 on the device: a whole page of 20 is missing, not the 12 that a segment would be."""
    for settings in ("", "per_process_memory_fraction:0.9", "large_segment_size_mb:34"):
        reserved = reserve(run_of([15, 11, 33, 33], [1, 2, 3, 4]), room(25, settings), grows=True)
        assert (reserved.fits, reserved.largest_refused_bytes) == (False, 33 * MIB), settings


@given(LARGE_RUNS, st.integers(0, 200), st.booleans())
def test_whatever_reserves_no_more_than_there_is_fits_and_nothing_else_does(
    run: Trace, capacity_mib: int, grows: bool
) -> None:
    endless = reserve(run, room(), grows=grows)
    limited = reserve(run, room(capacity_mib), grows=grows)
    assert limited.fits == (endless.peak_reserved_bytes <= capacity_mib * MIB)
    assert limited.peak_reserved_bytes == endless.peak_reserved_bytes
    assert limited.slack_bytes == endless.slack_bytes
    assert limited.num_alloc_retries >= (limited.largest_refused_bytes is not None)


def test_a_host_reserves_what_is_allocated() -> None:
    run = run_of([40, 60, 1], [1, -1, CACHE_EMPTIED, 2, 3])
    memory = estimate_memory(run, DeviceCapacity(capacity_bytes=10 * MIB, caches=False))
    assert memory.reserved.native == memory.reserved.expandable_segments
    assert memory.reserved.native.peak_reserved_bytes == memory.peak_allocated_bytes == 61 * MIB
    assert memory.reserved.native.slack_bytes == 0
    assert memory.reserved.native.fits  # whether 61 MiB are there is the budget's question


ENDLESS = DeviceCapacity(capacity_bytes=None)


def draw(run: Trace, places: int = 1000, *, grows: bool = False) -> Timeline:
    return make_timeline(run, ENDLESS, grows=grows, name="step", places=places)


@given(run=traces(empties=True), places=st.integers(1, 8), expandable=st.booleans())
def test_thinning_loses_neither_peak_and_the_owners_sum_to_what_is_allocated(
    run: Trace, places: int, expandable: bool
) -> None:
    memory = estimate_memory(run, ENDLESS)
    thin, full = (draw(run, count, grows=expandable) for count in (places, 10**6))
    assert len(thin.event) <= 3 * places + 2
    allocated = [sum(column[point] for column in thin.owners.values()) for point in range(len(thin.event))]
    assert max(allocated) == allocated[thin.peak] == memory.peak_allocated_bytes
    assert {owner: column[thin.peak] for owner, column in thin.owners.items()} == {
        owner: memory.owners_at_peak[owner] for owner in thin.owners
    }
    assert max(thin.reserved_bytes) == memory.reserved.modes[expandable].peak_reserved_bytes
    of_event = dict(zip(full.event, full.reserved_bytes, strict=True))
    assert [of_event[event] for event in thin.event] == list(thin.reserved_bytes)


@given(run=traces())
def test_holders_are_the_modules_that_hold_most(run: Trace) -> None:
    timeline = draw(run)
    for point, event in enumerate(timeline.event):
        held: dict[tuple[Owner, str], int] = {}
        for each in run.events[: event + 1]:
            owned = run.blocks[abs(each) - 1]
            size = max(512, -(-owned.size_bytes // 512) * 512)
            key = (owned.owner, owned.module)
            held[key] = held.get(key, 0) + (size if each > 0 else -size)
        largest = sorted((size for size in held.values() if size), reverse=True)[:HOLDERS]
        named = timeline.holders[point]
        assert [holder.size_bytes for holder in named] == largest
        owners = list(timeline.owners)
        assert all(held[owners[holder.owner], timeline.modules[holder.module]] == holder.size_bytes for holder in named)


def estimate(run: Trace) -> MemoryEstimate:
    return estimate_memory(run, ENDLESS)


def test_the_bytes_at_the_peak_belong_to_whoever_is_alive_then() -> None:
    weights = block(1024, Owner.WEIGHTS, "layer.weight")
    dead = block(4096, Owner.ACTIVATIONS, "early")
    alive = block(8192, Owner.ACTIVATIONS, "late")
    memory = estimate(trace([weights, dead, alive], [1, 2, -2, CACHE_EMPTIED, 3, -3]))
    expected = dict.fromkeys(Owner, 0) | {Owner.WEIGHTS: 1024, Owner.ACTIVATIONS: 8192}
    assert memory.owners_at_peak == expected
    assert memory.modules_at_peak == (("late", 8192),)


def test_the_first_of_two_equal_peaks_is_the_peak_and_phases_have_their_own_in_the_order_they_were_met() -> None:
    blocks = [block(512, Owner.ACTIVATIONS), block(512, Owner.TEMPORARY)]
    starts = [(0, Phase.LOAD), (0, Phase.FORWARD), (2, Phase.BACKWARD)]
    memory = estimate(trace(blocks, [1, -1, 2], starts))
    assert memory.peak_phase is Phase.FORWARD
    assert memory.owners_at_peak[Owner.ACTIVATIONS] == 512
    with pytest.raises(ValueError, match="empty"):
        estimate(trace([], []))
    blocks = [block(1024, Owner.WEIGHTS), block(2048), block(512), block(512)]
    starts = [(0, Phase.LOAD), (1, Phase.FORWARD), (3, Phase.BACKWARD), (5, Phase.FORWARD)]
    memory = estimate(trace(blocks, [1, 2, -2, 3, -3, 4], starts))
    assert list(memory.phases.items()) == [(Phase.LOAD, 1024), (Phase.FORWARD, 3072), (Phase.BACKWARD, 1536)]


def test_modules_are_listed_by_size_and_only_what_their_forwards_made() -> None:
    sizes = {f"layers.{index}": 512 * (index + 1) for index in range(LARGEST_MODULES + 2)}
    blocks = [block(size, Owner.ACTIVATIONS, name) for name, size in sizes.items()]
    blocks += [block(512, Owner.TEMPORARY, "layers.0"), block(99 * 512, Owner.WEIGHTS, "embedding"), block(99 * 512)]
    memory = estimate(trace(blocks, list(range(1, len(blocks) + 1))))
    assert memory.modules_at_peak == tuple((f"layers.{index}", 512 * (index + 1)) for index in (6, 5, 4, 3, 2))


@given(traces(largest=48 * MIB, empties=True))
def test_parts_add_up_to_the_peak_exactly(run: Trace) -> None:
    memory = estimate(run)
    peak = memory.peak_allocated_bytes
    assert sum(memory.owners_at_peak.values()) == max(memory.phases.values()) == peak
    assert memory.phases[memory.peak_phase] == peak
    assert set(memory.owners_at_peak) == set(Owner)
    held = memory.owners_at_peak[Owner.ACTIVATIONS] + memory.owners_at_peak[Owner.TEMPORARY]
    assert sum(size for _, size in memory.modules_at_peak) <= held
    sizes = [round_size(one.size_bytes) for one in run.blocks]
    assert max(sizes) <= peak <= sum(sizes)
    for mode, expandable in ((memory.reserved.native, False), (memory.reserved.expandable_segments, True)):
        assert mode == reserve(run, ENDLESS, grows=expandable)
        assert peak <= mode.peak_reserved_bytes
        assert 0 <= mode.slack_bytes < mode.peak_reserved_bytes
        assert mode.fits
