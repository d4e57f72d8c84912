"""Each rule of the allocator by numbers worked out by hand. Addresses count from the first segment's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotrain_mem.allocator.device_memory import FIRST_ADDRESS
from autotrain_mem.allocator.out_of_memory import Refusal, format_size
from autotrain_mem.allocator.rounding import MIN_BLOCK_BYTES, round_size
from autotrain_mem.allocator.settings import parse_settings
from autotrain_mem.allocator.simulator import CachingAllocator, OutOfMemory
from autotrain_mem.units import GIB, KIB, MIB

SIZES = st.integers(0, 100 * GIB)


def allocator_of(settings: str = "", capacity_mib: int | None = None, total_mib: int | None = None) -> CachingAllocator:
    capacity, total = (None if each is None else each * MIB for each in (capacity_mib, total_mib))
    return CachingAllocator(capacity, parse_settings(settings), total_bytes=total)


def take(allocator: CachingAllocator, mib: float, stream: int = 0) -> int:
    return allocator.malloc(int(mib * MIB), stream)


def place(address: int) -> float:
    """In MiB from the first segment."""
    return (address - FIRST_ADDRESS) / MIB


def reserved(allocator: CachingAllocator) -> float:
    """In MiB."""
    return allocator.reserved_bytes / MIB


def stat(allocator: CachingAllocator, name: str) -> int:
    return allocator.memory_stats()[name]


# -- rounding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "block"),
    [(0, 512), (1, 512), (511, 512), (512, 512), (513, 1024), (1024, 1024), (1_000_000, 1_000_448)],
)
def test_a_request_is_rounded_up_to_512_bytes(requested: int, block: int) -> None:
    assert round_size(requested) == block


@given(SIZES)
def test_a_block_is_the_smallest_multiple_of_512_that_holds_the_request(requested: int) -> None:
    size = round_size(requested)
    assert size % MIN_BLOCK_BYTES == 0
    assert size >= max(requested, 1)
    assert size - MIN_BLOCK_BYTES < max(requested, 1)


@given(SIZES, SIZES)
def test_a_larger_request_never_gets_a_smaller_block(first: int, second: int) -> None:
    small, large = sorted([first, second])
    assert round_size(small) <= round_size(large)


@given(SIZES)
def test_rounding_twice_changes_nothing(requested: int) -> None:
    assert round_size(round_size(requested)) == round_size(requested)


@given(SIZES.filter(bool))
def test_an_allocator_counts_the_rounded_size_and_the_requested_one(requested: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(requested)
    surplus = allocator.allocated_bytes - round_size(requested)
    assert 0 <= surplus <= MIB  # the end of a segment that is not worth cutting off
    assert stat(allocator, "requested_bytes.all.current") == requested


def test_of_nothing_nothing_is_counted_and_its_address_may_be_freed() -> None:
    allocator = CachingAllocator()
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert stat(allocator, "allocation.all.allocated") == 0


def test_peaks_stay_when_blocks_go_and_are_reset_to_what_is_there() -> None:
    allocator = CachingAllocator()
    first = allocator.malloc(512)
    second = allocator.malloc(1024)
    allocator.free(first)
    allocator.malloc(512)
    assert (allocator.allocated_bytes, allocator.peak_allocated_bytes) == (1536, 1536)
    allocator.free(second)
    allocator.reset_peak_stats()
    assert (allocator.allocated_bytes, allocator.peak_allocated_bytes) == (512, 512)
    assert allocator.peak_reserved_bytes == 2 * MIB


def test_an_address_that_is_not_allocated_cannot_be_freed() -> None:
    allocator = CachingAllocator()
    address = allocator.malloc(512)
    allocator.free(address)
    with pytest.raises(KeyError):
        allocator.free(address)


# -- segments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mib", "segment_mib"),
    [(1 / 2048, 2), (1, 2), (1.001, 20), (9.99, 20), (10, 10), (10.1, 12), (20.5, 22), (33, 34), (1000.5, 1002)],
)
def test_a_request_that_no_cached_block_serves_takes_a_segment(mib: float, segment_mib: int) -> None:
    allocator = allocator_of()
    take(allocator, mib)
    assert reserved(allocator) == segment_mib
    assert stat(allocator, "segment.all.current") == stat(allocator, "num_device_alloc") == 1


def test_requests_of_up_to_1_mib_share_segments_of_their_own() -> None:
    allocator = allocator_of()
    take(allocator, 1.5)  # of 20 MiB, of which 18.5 are free
    take(allocator, 1)
    take(allocator, 0.5)
    take(allocator, 0.5)
    assert reserved(allocator) == 20 + 2
    assert stat(allocator, "segment.small_pool.current") == 1
    take(allocator, 0.25)
    assert stat(allocator, "segment.small_pool.current") == 2
    assert stat(allocator, "allocated_bytes.small_pool.current") == 2.25 * MIB


def test_a_large_segment_may_be_set_larger() -> None:
    allocator = allocator_of("large_segment_size_mb:40")
    take(allocator, 1.5)
    assert reserved(allocator) == 40
    take(allocator, 10)
    assert reserved(allocator) == 40
    take(allocator, 30)
    assert reserved(allocator) == 70


# -- best fit ----------------------------------------------------------------------------------------------------------


def with_gaps(*sizes_mib: float) -> tuple[CachingAllocator, list[int]]:
    """Free blocks of these sizes in one segment, each followed by 2 MiB that are in use."""
    allocator = allocator_of("large_segment_size_mb:100")
    gaps = []
    for size in sizes_mib:
        gaps.append(take(allocator, size))
        take(allocator, 2)
    for gap in gaps:
        allocator.free(gap)
    return allocator, gaps


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator, (_, five, _) = with_gaps(8, 5, 6)
    assert take(allocator, 4.5) == five


def test_of_equal_blocks_the_one_of_the_lowest_address_is_taken() -> None:
    allocator, (first, second) = with_gaps(5, 5)
    assert take(allocator, 5) == first
    assert take(allocator, 5) == second


def test_blocks_of_another_stream_are_not_taken() -> None:
    allocator = allocator_of()
    allocator.free(take(allocator, 12))
    take(allocator, 12, stream=1)
    assert reserved(allocator) == 24


def test_neighbours_that_are_free_become_one_block() -> None:
    allocator = allocator_of()
    first, second, third, _ = [take(allocator, 4) for _ in range(4)]
    for address in (first, third, second):
        allocator.free(address)
    assert stat(allocator, "inactive_split.all.current") == 2  # 12 MiB, and the last 4 of the 20
    assert take(allocator, 11.9) == first
    assert reserved(allocator) == 20


# -- splitting ---------------------------------------------------------------------------------------------------------


def test_a_small_block_is_split_where_512_bytes_are_left() -> None:
    allocator = allocator_of()
    allocator.malloc(MIB)
    allocator.malloc(MIB - 512)
    assert stat(allocator, "inactive_split_bytes.small_pool.current") == 512
    allocator.malloc(1)
    assert reserved(allocator) == 2


def test_a_large_block_is_split_only_where_more_than_1_mib_is_left() -> None:
    allocator = allocator_of()
    allocator.free(take(allocator, 12))
    address = take(allocator, 11)
    assert allocator.allocated_bytes == 12 * MIB
    assert stat(allocator, "requested_bytes.all.current") == 11 * MIB
    allocator.free(address)
    allocator.malloc(11 * MIB - 512)
    assert allocator.allocated_bytes == 11 * MIB - 512
    assert stat(allocator, "inactive_split_bytes.all.current") == MIB + 512


def test_inactive_split_counts_what_is_free_beside_others() -> None:
    allocator = allocator_of()
    address = take(allocator, 12)
    allocator.free(address)
    assert stat(allocator, "inactive_split.all.current") == 0  # a whole segment
    take(allocator, 4.5)
    assert stat(allocator, "inactive_split.all.current") == 1
    assert stat(allocator, "inactive_split_bytes.all.current") == 7.5 * MIB


# -- max_split_size_mb -------------------------------------------------------------------------------------------------


def test_an_oversized_block_is_neither_split_nor_given_to_a_smaller_request() -> None:
    allocator = allocator_of("max_split_size_mb:32")
    large = take(allocator, 40)
    allocator.free(large)
    take(allocator, 30)  # below the limit: not out of the 40
    assert reserved(allocator) == 70
    assert take(allocator, 33) == large  # at most 20 MiB too large: given whole
    assert allocator.allocated_bytes == 70 * MIB
    assert stat(allocator, "oversize_allocations.current") == stat(allocator, "oversize_segments.current") == 1
    assert stat(allocator, "max_split_size") == 32 * MIB


def test_an_oversized_request_takes_no_block_that_is_too_much_larger() -> None:
    allocator = allocator_of("max_split_size_mb:32")
    large = take(allocator, 60)
    allocator.free(large)
    take(allocator, 40)  # 60 >= 40 + 20
    assert reserved(allocator) == 100
    assert take(allocator, 40.5) == large


def test_how_much_larger_a_block_may_be_can_be_set() -> None:
    allocator = allocator_of("max_split_size_mb:32,max_non_split_rounding_mb:21")
    large = take(allocator, 60)
    allocator.free(large)
    assert take(allocator, 40) == large


def test_a_block_below_the_limit_is_split() -> None:
    allocator = allocator_of("max_split_size_mb:32")
    allocator.free(take(allocator, 30))
    take(allocator, 15)
    take(allocator, 15)
    assert reserved(allocator) == 30
    assert stat(allocator, "oversize_segments.allocated") == 0


def test_oversized_blocks_are_given_back_before_all_that_is_cached() -> None:
    allocator = allocator_of("max_split_size_mb:32", capacity_mib=120)
    for address in [take(allocator, 40), take(allocator, 34), take(allocator, 20)]:
        allocator.free(address)
    take(allocator, 60)  # the 40 and the 34 go, largest first, since 40 are less than 60
    assert reserved(allocator) == 60 + 20
    assert allocator.num_alloc_retries == 0
    assert stat(allocator, "num_device_free") == 2


def test_one_oversized_block_that_is_enough_is_given_back_alone() -> None:
    allocator = allocator_of("max_split_size_mb:32", capacity_mib=150)
    for address in [take(allocator, 40), take(allocator, 90)]:
        allocator.free(address)
    take(allocator, 50)  # 90 >= 50 + 20: not for this request, but enough to make room for it
    assert reserved(allocator) == 40 + 50
    assert allocator.num_alloc_retries == 0


def test_oversized_pages_of_an_expandable_segment_are_no_segment_to_give_back() -> None:
    allocator = allocator_of("expandable_segments:True,max_split_size_mb:32", capacity_mib=100)
    gap, _ = take(allocator, 60), take(allocator, 20)
    allocator.free(gap)
    take(allocator, 70)
    assert (reserved(allocator), allocator.num_alloc_retries) == (20 + 80, 1)


# -- garbage collection and fraction -----------------------------------------------------------------------------------


def test_old_cached_segments_are_freed_above_the_threshold() -> None:
    """66 MiB are reserved where 50 % of 100 are the threshold, so 16 are to be reclaimed. Free are 20 MiB since two
    requests and 22 MiB since one: those older than 1.5 go, which is enough."""
    allocator = allocator_of("garbage_collection_threshold:0.5,per_process_memory_fraction:0.5", 200, 200)
    old, young, _ = take(allocator, 20), take(allocator, 22), take(allocator, 24)
    allocator.free(old)
    allocator.free(young)
    allocator.free(take(allocator, 22))
    take(allocator, 26)
    assert (reserved(allocator), allocator.num_device_free, allocator.num_alloc_retries) == (66 - 20 + 26, 1, 0)
    assert take(allocator, 22) == young


def test_without_a_limit_on_the_process_nothing_is_collected() -> None:
    allocator = allocator_of("garbage_collection_threshold:0.1", capacity_mib=100)
    allocator.free(take(allocator, 40))
    take(allocator, 50)
    assert reserved(allocator) == 90


def test_a_fraction_limits_what_is_reserved_of_the_whole_device() -> None:
    allocator = allocator_of("per_process_memory_fraction:0.5", capacity_mib=90, total_mib=100)
    assert allocator.allowed_bytes == 50 * MIB
    take(allocator, 30)
    with pytest.raises(OutOfMemory, match=r"is free\. 50\.00 MiB allowed; Of the allocated memory"):
        take(allocator, 22)
    take(allocator, 20)
    assert reserved(allocator) == 50


def test_a_fraction_of_a_device_without_a_size_is_refused() -> None:
    with pytest.raises(ValueError, match="give total_bytes"):
        allocator_of("per_process_memory_fraction:0.5")


# -- retries and refusals ----------------------------------------------------------------------------------------------


def test_before_a_request_is_refused_everything_cached_is_given_back_once() -> None:
    allocator = allocator_of(capacity_mib=100)
    allocator.free(take(allocator, 60))
    take(allocator, 80)
    assert (reserved(allocator), allocator.num_alloc_retries, allocator.num_ooms) == (80, 1, 0)
    assert (allocator.num_device_alloc, allocator.num_device_free, allocator.num_sync_all_streams) == (2, 1, 1)
    with pytest.raises(OutOfMemory):
        take(allocator, 30)
    assert (reserved(allocator), allocator.num_alloc_retries, allocator.num_ooms) == (80, 2, 1)
    assert allocator.allocated_bytes == 80 * MIB


def test_a_retry_that_cannot_give_a_split_segment_back_is_refused() -> None:
    allocator = allocator_of(capacity_mib=40)
    gap = take(allocator, 9)
    take(allocator, 2)
    allocator.free(gap)
    with pytest.raises(OutOfMemory) as raised:
        take(allocator, 21)
    refusal = raised.value.refusal
    assert (refusal.requested_bytes, refusal.segment_bytes) == (21 * MIB, 22 * MIB)
    assert (refusal.free_bytes, refusal.reserved_bytes, refusal.allocated_bytes) == (20 * MIB, 20 * MIB, 2 * MIB)


def test_a_refusal_is_told_in_torchs_words() -> None:
    allocator = CachingAllocator(
        3 * GIB, parse_settings("per_process_memory_fraction:0.75"), total_bytes=4 * GIB, outside_bytes=300 * MIB
    )
    allocator.malloc(2 * GIB)
    allocator.free(allocator.malloc(MIB))
    allocator.malloc(512)
    with pytest.raises(OutOfMemory) as raised:
        allocator.malloc(2 * GIB + 1)
    assert str(raised.value) == (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 1022.00 MiB "
        "is free. Including non-PyTorch memory, this process has 2.29 GiB memory in use. 3.00 GiB allowed; Of the "
        "allocated memory 2.00 GiB is allocated by PyTorch, and 2.00 MiB is reserved by PyTorch but unallocated. If "
        "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
        "avoid fragmentation.  See documentation for Memory Management  "
        "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )


def test_a_refusal_leaves_out_what_is_not_known() -> None:
    refusal = Refusal(
        requested_bytes=1, segment_bytes=20, total_bytes=30, free_bytes=10, allocated_bytes=4, reserved_bytes=20
    )
    start = "CUDA out of memory. Tried to allocate 20 bytes. GPU 0 has a total capacity of 30 bytes of which 10 bytes "
    assert refusal.message().startswith(
        f"{start}is free. Of the allocated memory 4 bytes is allocated by PyTorch, and 16"
    )


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "0 bytes"),
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (MIB, "1024.00 KiB"),
        (MIB + 1, "1.00 MiB"),
        (21 * MIB, "21.00 MiB"),
        (GIB, "1024.00 MiB"),
        (GIB + 1, "1.00 GiB"),
        (3 * GIB // 2 + 512 * KIB, "1.50 GiB"),
        (2000 * GIB, "2000.00 GiB"),
    ],
)
def test_sizes_are_written_as_torch_writes_them(size: int, said: str) -> None:
    assert format_size(size) == said


# -- other streams -----------------------------------------------------------------------------------------------------


def test_a_block_that_another_stream_uses_is_free_once_that_stream_is_done() -> None:
    allocator = allocator_of()
    address = take(allocator, 12)
    allocator.record_stream(address, 1)
    allocator.free(address)
    assert allocator.allocated_bytes == 0
    assert stat(allocator, "active_bytes.all.current") == stat(allocator, "requested_bytes.all.current") == 12 * MIB
    assert take(allocator, 12) != address
    allocator.complete_events()
    assert stat(allocator, "active_bytes.all.current") == 24 * MIB  # the next request finds out
    assert take(allocator, 12) == address
    assert reserved(allocator) == 24


def test_a_block_waits_for_each_stream_that_uses_it_but_its_own() -> None:
    allocator = allocator_of()
    own, others = take(allocator, 12), take(allocator, 12)
    allocator.record_stream(own, 0)
    for stream in (1, 2, 2):
        allocator.record_stream(others, stream)
    allocator.free(own)
    allocator.free(others)
    assert stat(allocator, "active.all.current") == 1
    allocator.complete_events()
    allocator.malloc(512)
    assert stat(allocator, "active.large_pool.current") == 0


def test_a_retry_waits_for_all_streams() -> None:
    allocator = allocator_of(capacity_mib=30)
    address = take(allocator, 20)
    allocator.record_stream(address, 1)
    allocator.free(address)
    take(allocator, 24)
    assert (reserved(allocator), allocator.num_alloc_retries) == (24, 1)


def test_what_is_used_after_the_events_is_not_done_with_them() -> None:
    allocator = allocator_of()
    allocator.complete_events()
    address = take(allocator, 12)
    allocator.record_stream(address, 1)
    allocator.free(address)
    assert take(allocator, 12) != address


# -- empty_cache -------------------------------------------------------------------------------------------------------


def test_an_emptied_cache_keeps_segments_of_which_something_is_in_use() -> None:
    allocator = allocator_of()
    whole, part, used = take(allocator, 12), take(allocator, 4), take(allocator, 4)
    small = allocator.malloc(512)
    allocator.free(whole)
    allocator.free(part)
    allocator.empty_cache()
    assert reserved(allocator) == 20 + 2
    allocator.free(used)
    allocator.free(small)
    allocator.empty_cache()
    assert allocator.reserved_bytes == stat(allocator, "segment.all.current") == 0
    assert allocator.peak_reserved_bytes == 34 * MIB


# -- expandable segments -----------------------------------------------------------------------------------------------


def expandable(capacity_mib: int | None = None, more: str = "") -> CachingAllocator:
    return allocator_of(f"expandable_segments:True{more}", capacity_mib)


def test_an_expandable_segment_grows_by_pages_of_20_or_of_2_mib() -> None:
    allocator = expandable()
    take(allocator, 1.5)
    assert reserved(allocator) == 20
    take(allocator, 18.5)
    assert reserved(allocator) == 20
    take(allocator, 41)
    assert reserved(allocator) == 20 + 60
    allocator.malloc(512)
    assert reserved(allocator) == 80 + 2
    assert stat(allocator, "segment.all.current") == 0  # torch counts pages as reserved, and as no segments
    assert stat(allocator, "num_device_alloc") == 3


def test_a_page_is_as_large_as_a_large_segment_is_set() -> None:
    allocator = expandable(more=",large_segment_size_mb:34")
    take(allocator, 1.5)
    assert reserved(allocator) == 34


def test_a_request_starts_in_the_free_end_of_what_is_mapped() -> None:
    allocator = expandable()
    take(allocator, 15)
    second = take(allocator, 30)
    assert (place(second), reserved(allocator)) == (15, 60)  # 5 MiB were free, two more pages hold the other 25


def test_an_expandable_block_is_split_down_to_512_bytes() -> None:
    allocator = expandable()
    allocator.malloc(20 * MIB - 512)
    assert allocator.allocated_bytes == 20 * MIB - 512
    assert stat(allocator, "inactive_split_bytes.all.current") == 0  # torch leaves expandable segments out


def test_an_emptied_cache_unmaps_whole_pages_and_a_request_maps_the_lowest_again() -> None:
    allocator = expandable()
    first, second, third = take(allocator, 50), take(allocator, 50), take(allocator, 20)
    allocator.free(second)
    allocator.empty_cache()
    assert reserved(allocator) == 120 - 40  # of 50 to 100 MiB the pages from 60 to 100
    assert stat(allocator, "num_device_free") == 1
    again = take(allocator, 15)
    assert (place(again), reserved(allocator)) == (50, 100)  # the 10 MiB that stayed, and one page
    allocator.free(first)
    assert place(take(allocator, 45)) == 0
    del third


def test_a_retry_unmaps_what_is_free_for_use_at_another_place() -> None:
    allocator = expandable(capacity_mib=100)
    first, second = take(allocator, 40), take(allocator, 40)
    allocator.free(first)
    third = take(allocator, 60)  # 20 are left, and nowhere 60 in a row: the 40 that are free are mapped elsewhere
    assert (place(second), place(third)) == (40, 120)
    assert (reserved(allocator), allocator.num_alloc_retries) == (100, 1)
    assert allocator.allocated_bytes == 100 * MIB


def test_what_a_native_allocator_cannot_join_pages_can() -> None:
    """Two cached segments of 40 MiB hold no 80; two neighbours of one segment do."""
    reserves = {}
    for name, allocator in {"native": allocator_of(), "expandable": expandable()}.items():
        for address in [take(allocator, 40), take(allocator, 40)]:
            allocator.free(address)
        take(allocator, 80)
        reserves[name] = reserved(allocator)
    assert reserves == {"native": 160, "expandable": 80}


def test_of_expandable_blocks_the_one_that_can_grow_least_is_taken() -> None:
    """The last 5 MiB before what is not mapped count with all of it, so 8 MiB in the middle fit better."""
    allocator = expandable()
    gap, _ = take(allocator, 8), take(allocator, 7)
    allocator.free(gap)
    assert place(take(allocator, 4)) == 0
    assert reserved(allocator) == 20


def test_streams_and_pools_have_segments_of_their_own() -> None:
    allocator = allocator_of("expandable_segments:True", capacity_mib=100)
    places = [place(take(allocator, 20)), place(take(allocator, 20, stream=1)), place(take(allocator, 1))]
    assert places == [0, 120, 240]  # each holds an eighth more than the device, in whole pages


def test_a_segment_that_is_all_unmapped_is_given_up() -> None:
    allocator = allocator_of("expandable_segments:True", capacity_mib=100)
    allocator.free(take(allocator, 20))
    allocator.empty_cache()
    assert allocator.segments() == []
    assert place(take(allocator, 20)) == 120


def test_a_request_beyond_a_whole_segment_is_refused() -> None:
    allocator = allocator_of("expandable_segments:True", capacity_mib=100)
    with pytest.raises(OutOfMemory):
        take(allocator, 300)
    assert (reserved(allocator), allocator.num_ooms) == (0, 1)


# -- what is told ------------------------------------------------------------------------------------------------------


def test_everything_that_happens_is_told_in_the_words_of_torchs_history() -> None:
    told: list[tuple[str, float, float, int]] = []
    allocator = CachingAllocator(
        24 * MIB, on_action=lambda action, address, size, stream: told.append((action, address, size, stream))
    )
    address = allocator.malloc(12 * MIB)
    allocator.free(address)
    other = allocator.malloc(20 * MIB, 1)
    with pytest.raises(OutOfMemory):
        allocator.malloc(22 * MIB, 1)
    assert told == [
        ("segment_alloc", address, 12 * MIB, 0),
        ("alloc", address, 12 * MIB, 0),
        ("free_requested", address, 12 * MIB, 0),
        ("free_completed", address, 12 * MIB, 0),
        ("segment_free", address, 12 * MIB, 0),
        ("segment_alloc", other, 20 * MIB, 1),
        ("alloc", other, 20 * MIB, 1),
        ("oom", 4 * MIB, 22 * MIB, 1),
    ]


def test_a_snapshot_lists_segments_and_their_blocks_by_address() -> None:
    allocator = allocator_of()
    first, second = take(allocator, 4), take(allocator, 4)
    allocator.free(first)
    (segment,) = allocator.segments()
    assert (segment["address"], segment["total_size"], segment["allocated_size"]) == (first, 20 * MIB, 4 * MIB)
    assert (segment["segment_type"], segment["is_expandable"], segment["stream"]) == ("large", False, 0)
    assert [(block["address"], block["size"], block["state"]) for block in segment["blocks"]] == [
        (first, 4 * MIB, "inactive"),
        (second, 4 * MIB, "active_allocated"),
        (second + 4 * MIB, 12 * MIB, "inactive"),
    ]
