"""Tests that a simulated card runs out of memory like the simulated allocator, with torch's message."""

import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotrain_mem.allocator.settings import AllocatorSettings
from autotrain_mem.allocator.simulator import CachingAllocator, OutOfMemory
from autotrain_mem.machine.simulated_card import SimulatedGpu
from autotrain_mem.support.units import MIB
from autotrain_mem.types import Hardware

CARD = Hardware(name="toy", origin="imagined", total_bytes=128 * MIB, free_bytes=110 * MIB, non_torch_bytes=10 * MIB)
ROOM_BYTES = 100 * MIB


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 60 * MIB)), max_size=20), st.booleans())
@settings(deadline=None)
def test_it_behaves_like_the_allocator_and_raises_its_message(program: list[tuple[bool, int]], grows: bool) -> None:
    chosen = AllocatorSettings(grows=grows)
    gpu = SimulatedGpu(CARD, chosen)
    allocator = CachingAllocator(ROOM_BYTES, chosen, total_bytes=128 * MIB, outside_bytes=10 * MIB)
    addresses: dict[int, int] = {}
    for number, (frees, size) in enumerate(program):
        said = None
        try:
            addresses[number] = allocator.malloc(size)
        except OutOfMemory as error:
            said = str(error)
        if said is None:
            gpu.allocate(number, size)
        else:
            with pytest.raises(torch.OutOfMemoryError) as raised:
                gpu.allocate(number, size)
            assert str(raised.value) == said
        if frees and number in addresses:
            allocator.free(addresses[number])
        if frees:
            gpu.free(number)
        assert gpu.memory_stats() == allocator.memory_stats()


def test_nothing_fits_if_less_is_free_than_the_process_needs_outside_the_allocator() -> None:
    full = SimulatedGpu(Hardware(name="full", origin="imagined", total_bytes=64, free_bytes=5, non_torch_bytes=9))
    with pytest.raises(torch.OutOfMemoryError):
        full.allocate(1, 1)


def test_refused_and_unknown_blocks_may_be_freed_and_other_streams_keep_up() -> None:
    gpu = SimulatedGpu(CARD)
    with pytest.raises(torch.OutOfMemoryError):
        gpu.allocate(1, 101 * MIB)
    gpu.allocate(2, 30 * MIB)
    gpu.record_stream(2, 1)
    for number in (1, 2, 2, 3):
        gpu.free(number)
    assert gpu.reading().allocated_bytes == 0
    gpu.allocate(4, 30 * MIB)
    assert gpu.reading().reserved_bytes == 30 * MIB


def test_a_block_that_is_freed_during_an_allocation_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimulatedGpu(CARD)
    malloc = CachingAllocator.malloc
    gpu.allocate(0, MIB)

    def interrupted(allocator: CachingAllocator, size_bytes: int, stream: int = 0) -> int:
        gpu.free(0)
        assert allocator.allocated_bytes == MIB  # not yet
        elsewhere = threading.Thread(target=gpu.free, args=(1,))
        elsewhere.start()
        elsewhere.join(10)
        assert not elsewhere.is_alive()
        return malloc(allocator, size_bytes, stream)

    with monkeypatch.context() as patch:
        patch.setattr(CachingAllocator, "malloc", interrupted)
        gpu.allocate(1, MIB)
    assert gpu.reading().allocated_bytes == 0


def test_threads_that_allocate_and_free_leave_nothing() -> None:
    gpu = SimulatedGpu(CARD)

    def work(first: int) -> None:
        for block in range(first, first + 500):
            gpu.allocate(block, MIB // 2)
            gpu.free(block)

    threads = [threading.Thread(target=work, args=(1000 * each,)) for each in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    gpu.empty_cache()
    assert (gpu.reading().allocated_bytes, gpu.reading().reserved_bytes) == (0, 0)
