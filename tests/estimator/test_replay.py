"""What a run reserves: without an end, near it, and beyond it; in both modes, under the user's settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import run_of, traces

from autotrain_mem.allocator.settings import AllocatorSettings, parse_settings
from autotrain_mem.allocator.simulator import CachingAllocator
from autotrain_mem.estimator.memory import estimate_memory
from autotrain_mem.estimator.replay import Room, reserve
from autotrain_mem.spec import ReservedEstimate, Trace
from autotrain_mem.spec.trace import CACHE_EMPTIED
from autotrain_mem.units import MIB

LARGE_RUNS = traces(largest=48 * MIB, empties=True)


def room(capacity_mib: int | None = None, settings: str = "", total_mib: int | None = None) -> Room:
    capacity, total = (None if each is None else each * MIB for each in (capacity_mib, total_mib))
    return Room(capacity_bytes=capacity, total_bytes=total, settings=parse_settings(settings))


def native(run: Trace, within: Room) -> ReservedEstimate:
    return reserve(run, within, expandable_segments=False)


def expandable(run: Trace, within: Room) -> ReservedEstimate:
    return reserve(run, within, expandable_segments=True)


# -- without an end ------------------------------------------------------------------------------------------------


@given(LARGE_RUNS, st.booleans(), st.sampled_from(("", "max_split_size_mb:20", "roundup_power2_divisions:4")))
def test_a_replay_is_what_the_allocator_does_with_the_same_calls(run: Trace, grows: bool, text: str) -> None:
    allocator = CachingAllocator(None, replace(parse_settings(text), expandable_segments=grows))
    addresses: dict[int, int] = {}
    for event in run.events:
        if event > 0:
            addresses[event] = allocator.malloc(run.blocks[event - 1].size_bytes)
        elif event == CACHE_EMPTIED:
            allocator.empty_cache()
        else:
            allocator.free(addresses.pop(-event))
    found = reserve(run, room(settings=text), expandable_segments=grows)
    assert found.peak_reserved_bytes == allocator.peak_reserved_bytes
    assert (found.num_alloc_retries, found.largest_refused_bytes) == (0, None)
    assert found.fits


def test_slack_is_what_was_not_allocated_when_the_peak_was_first_reached() -> None:
    run = run_of([40, 4, 60, 90], [1, 2, -1, 3, -3, -2, 4])
    found = native(run, room())
    assert found.peak_reserved_bytes == (40 + 20 + 60 + 90) * MIB
    assert found.slack_bytes == (40 + 20 + 60) * MIB
    assert native(run_of([40, 4], [1, -1, 2]), room()).slack_bytes == 0  # the 40 were, though they serve the 4 later


def test_an_emptied_cache_gives_back_what_a_later_request_would_stack_upon() -> None:
    cached = run_of([40, 60], [1, -1, 2])
    emptied = run_of([40, 60], [1, -1, CACHE_EMPTIED, 2])
    assert native(cached, room()).peak_reserved_bytes == 100 * MIB
    assert native(emptied, room()).peak_reserved_bytes == 60 * MIB
    assert expandable(cached, room()).peak_reserved_bytes == 60 * MIB


SAWTOOTH = [30.0, 34.0, 38.0, 42.0, 46.0]


def test_fragmentation_that_native_segments_suffer_and_expandable_ones_do_not() -> None:
    """Each tensor is a little larger than the one before, which is freed first: no cached segment serves it."""
    events = [sign * number for number in range(1, 6) for sign in (1, -1)]
    found = estimate_memory(run_of(SAWTOOTH, events), room(100))
    assert found.peak_allocated_bytes == 46 * MIB
    native, expandable = found.reserved.native, found.reserved.expandable_segments
    assert (native.peak_reserved_bytes, expandable.peak_reserved_bytes) == (190 * MIB, 60 * MIB)
    assert (native.fits, expandable.fits) == (False, True)


# -- near the end, and beyond --------------------------------------------------------------------------------------


def test_a_run_that_gets_by_with_retries_does_not_fit_and_needs_what_it_would_reserve() -> None:
    run = run_of([60, 80], [1, -1, 2])
    found = native(run, room(100))
    assert (found.num_alloc_retries, found.largest_refused_bytes) == (1, None)
    assert found.peak_limited_bytes < found.peak_reserved_bytes
    assert found.peak_reserved_bytes == 140 * MIB
    assert not found.fits
    assert native(run, room(140)).fits
    assert not native(run, room(139)).fits


def test_every_retry_is_counted() -> None:
    run = run_of([60, 80, 70, 90], [1, -1, 2, -2, 3, -3, 4])
    assert native(run, room(100)).num_alloc_retries == 2  # 70 are served by the cached 80


def test_the_largest_request_that_is_refused_is_told_as_it_was_asked() -> None:
    run = run_of([60, 50.5, 70.25, 45], [1, 2, 3, -2, 4])
    found = native(run, room(100))
    assert found.largest_refused_bytes == int(70.25 * MIB)
    assert found.num_alloc_retries == 2  # 50.5 and 70.25 MiB; then 52 are cached, which serve the last
    assert found.peak_reserved_bytes == (60 + 52 + 72) * MIB
    assert not found.fits


def test_a_refused_request_takes_no_part_of_what_is_left_for_others() -> None:
    run = run_of([60, 50, 40], [1, 2, 3])
    found = native(run, room(100))
    assert (found.num_alloc_retries, found.largest_refused_bytes) == (1, 50 * MIB)


@pytest.mark.parametrize("settings", ["", "per_process_memory_fraction:0.9", "large_segment_size_mb:34"])
def test_pages_that_exceed_a_request_that_was_refused_do_not_end_the_run(settings: str) -> None:
    """11 MiB find 5 mapped and 5 on the device: a whole page of 20 is missing, not the 12 that a segment would be."""
    found = expandable(run_of([15, 11, 33, 33], [1, 2, 3, 4]), room(25, settings))
    assert not found.fits
    assert found.largest_refused_bytes == 33 * MIB


def test_a_request_beyond_the_whole_device_does_not_end_the_run() -> None:
    found = estimate_memory(run_of([1, 700], [1, 2]), room(100))
    assert (
        found.reserved.native.largest_refused_bytes
        == found.reserved.expandable_segments.largest_refused_bytes
        == 700 * MIB
    )
    native, expandable = found.reserved.native, found.reserved.expandable_segments
    assert (native.peak_reserved_bytes, expandable.peak_reserved_bytes) == (702 * MIB, 702 * MIB)


def test_a_device_without_any_room_refuses_everything() -> None:
    found = native(run_of([1, 2], [1, 2]), room(0))
    assert (found.num_alloc_retries, found.largest_refused_bytes) == (2, 2 * MIB)


@given(LARGE_RUNS, st.integers(0, 200), st.booleans())
def test_whatever_reserves_no_more_than_there_is_fits_and_nothing_else_does(
    run: Trace, capacity_mib: int, grows: bool
) -> None:
    endless = reserve(run, room(), expandable_segments=grows)
    limited = reserve(run, room(capacity_mib), expandable_segments=grows)
    assert limited.fits == (endless.peak_reserved_bytes <= capacity_mib * MIB)
    assert limited.peak_reserved_bytes == endless.peak_reserved_bytes
    assert limited.slack_bytes == endless.slack_bytes
    assert limited.num_alloc_retries >= (limited.largest_refused_bytes is not None)


@given(LARGE_RUNS, st.integers(0, 200), st.booleans(), st.sampled_from((0.0, 0.5)))
def test_any_run_comes_to_its_end_under_any_settings(run: Trace, capacity_mib: int, grows: bool, share: float) -> None:
    settings = AllocatorSettings(
        max_split_bytes=32 * MIB, garbage_collection_threshold=share, per_process_memory_fraction=0.7
    )
    within = Room(capacity_bytes=capacity_mib * MIB, total_bytes=(capacity_mib + 9) * MIB, settings=settings)
    found = reserve(run, within, expandable_segments=grows)
    assert found.fits == (found.num_alloc_retries == 0)


# -- the room ------------------------------------------------------------------------------------------------------


def test_a_host_reserves_what_is_allocated() -> None:
    run = run_of([40, 60, 1], [1, -1, CACHE_EMPTIED, 2, 3])
    found = estimate_memory(run, Room(capacity_bytes=10 * MIB, caches=False))
    assert found.reserved.native == found.reserved.expandable_segments
    assert found.reserved.native.peak_reserved_bytes == found.peak_allocated_bytes == 61 * MIB
    assert found.reserved.native.slack_bytes == 0
    assert found.reserved.native.fits  # whether 61 MiB are there is the budget's question


def test_a_limit_on_splitting_counts() -> None:
    run = run_of([40, 30], [1, -1, 2])
    assert native(run, room()).peak_reserved_bytes == 40 * MIB
    assert native(run, room(settings="max_split_size_mb:32")).peak_reserved_bytes == 70 * MIB


def test_a_limit_on_the_process_counts_and_what_is_needed_is_told_without_it() -> None:
    run = run_of([40, 30], [1, 2])
    found = native(run, room(100, "per_process_memory_fraction:0.5", total_mib=120))
    assert (found.num_alloc_retries, found.largest_refused_bytes) == (1, 30 * MIB)
    assert found.peak_reserved_bytes == 70 * MIB
    assert native(run, room(100, "per_process_memory_fraction:0.6", total_mib=120)).fits


def test_segments_that_are_collected_are_room_for_others() -> None:
    run = run_of([40, 50], [1, -1, 2])
    settings = "garbage_collection_threshold:0.3,per_process_memory_fraction:0.95"
    assert native(run, room(100, settings)).peak_reserved_bytes == 50 * MIB
    assert native(run, room(89, settings)).fits
    assert not native(run, room(89)).fits


def test_the_mode_is_chosen_by_the_call_whatever_the_settings_say() -> None:
    run = run_of([40, 60], [1, -1, 2])
    assert native(run, room(settings="expandable_segments:True")).peak_reserved_bytes == 100 * MIB
