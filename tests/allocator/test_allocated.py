"""The count of allocated bytes: what torch's ``allocated_bytes.all`` would say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotrain_mem.allocator.allocated import AllocatedBytes
from autotrain_mem.allocator.rounding import MIN_BLOCK_BYTES, round_size
from autotrain_mem.units import GIB

SIZES = st.integers(0, 100 * GIB)


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


def test_allocating_counts_the_rounded_size_and_says_it() -> None:
    allocated = AllocatedBytes()
    assert allocated.allocate(0, 513) == 1024
    assert (allocated.current_bytes, allocated.peak_bytes) == (1024, 1024)


def test_the_peak_stays_when_blocks_go() -> None:
    allocated = AllocatedBytes()
    allocated.allocate(0, 512)
    allocated.allocate(1, 1024)
    allocated.free(0)
    allocated.allocate(2, 512)
    assert (allocated.current_bytes, allocated.peak_bytes) == (1536, 1536)
    allocated.free(1)
    allocated.free(2)
    assert (allocated.current_bytes, allocated.peak_bytes) == (0, 1536)


def test_a_block_that_was_never_counted_or_is_freed_twice_is_ignored() -> None:
    allocated = AllocatedBytes()
    allocated.allocate(0, 512)
    allocated.free(7)
    allocated.free(0)
    allocated.free(0)
    assert allocated.current_bytes == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 1 << 20)), max_size=60))
def test_current_is_the_sum_of_live_blocks_and_the_peak_is_its_maximum(
    program: list[tuple[bool, int, int]],
) -> None:
    allocated = AllocatedBytes()
    live: dict[int, int] = {}
    peak = 0
    for number, (wants, chosen, size) in enumerate(program):
        if wants or not live:
            live[number] = allocated.allocate(number, size)
        else:
            gone = sorted(live)[chosen % len(live)]
            del live[gone]
            allocated.free(gone)
        peak = max(peak, sum(live.values()))
        assert allocated.current_bytes == sum(live.values())
        assert allocated.peak_bytes == peak
