"""Pinned host memory comes in blocks of a power of two that serve their own size alone and are never returned."""

import pytest

from autotrain_mem.rehearsal.trace.ledger import PinnedMemory, block_bytes
from autotrain_mem.support.units import MIB


class Holder:
    """What a tensor lives as long as."""


@pytest.mark.parametrize(("size", "block"), [(0, 0), (1, 1), (3, 4), (4, 4), (14 * MIB, 16 * MIB)])
def test_a_tensor_takes_the_next_power_of_two(size: int, block: int) -> None:
    assert block_bytes(size) == block


def test_a_block_that_is_free_again_serves_its_own_size_and_stays() -> None:
    pinned = PinnedMemory()
    first, second = Holder(), Holder()
    pinned.take(first, 60)
    pinned.take(second, 64)
    del first
    third = Holder()
    pinned.take(third, 50)
    assert pinned.peak_bytes == 2 * 64
    fourth = Holder()
    pinned.take(fourth, 20)
    assert pinned.peak_bytes == 2 * 64 + 32
    del second, third, fourth
    assert pinned.peak_bytes == 2 * 64 + 32


def test_what_is_kept_counts_once_however_often_it_is_told() -> None:
    pinned = PinnedMemory()
    pinned.keep([60, 60])
    pinned.keep([60, 60])
    assert pinned.peak_bytes == 2 * 64
