"""What the recorded answers do not reach, by numbers worked out by hand. Addresses count from the first segment's."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotrain_mem.allocator.blocks import MIN_BLOCK_BYTES, round_size
from autotrain_mem.allocator.out_of_memory import format_size
from autotrain_mem.allocator.segments import FIRST_ADDRESS
from autotrain_mem.allocator.settings import parse_settings
from autotrain_mem.allocator.simulator import CachingAllocator, OutOfMemory
from autotrain_mem.support.units import GIB, MIB


def allocator_of(settings: str = "", capacity_mib: int | None = None) -> CachingAllocator:
    capacity = None if capacity_mib is None else capacity_mib * MIB
    return CachingAllocator(capacity, parse_settings(settings))


def played(allocator: CachingAllocator, program: str) -> dict[str, float]:
    """Plays a program; returns torch's statistics, and where each block lies from the first segment on, bytes in MiB.

    ``a=12`` takes 12 MiB, ``a=12/1`` on stream 1; ``-a`` frees; ``empty`` empties the cache.
    """
    addresses: dict[str, int] = {}
    for step in program.split():
        name, _, taken = step.partition("=")
        if taken:
            mib, _, stream = taken.partition("/")
            addresses[name] = allocator.malloc(int(float(mib) * MIB), int(stream or 0))
        elif step == "empty":
            allocator.empty_cache()
        else:
            allocator.free(addresses[name.removeprefix("-")])
    places = {name: (address - FIRST_ADDRESS) / MIB for name, address in addresses.items()}
    held = {"reserved": allocator.reserved_bytes / MIB, "allocated": allocator.allocated_bytes / MIB}
    return allocator.memory_stats() | places | held


@given(st.integers(0, 100 * GIB))
def test_a_block_is_the_smallest_multiple_of_512_that_holds_the_request(requested: int) -> None:
    size = round_size(requested)
    assert size % MIN_BLOCK_BYTES == 0
    assert size >= max(requested, 1)
    assert size - MIN_BLOCK_BYTES < max(requested, 1)


def test_of_nothing_nothing_is_counted_and_its_address_may_be_freed() -> None:
    allocator = CachingAllocator()
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert allocator.peak_allocated_bytes == 0
    with pytest.raises(KeyError):
        allocator.free(FIRST_ADDRESS)


RULES = """
a small block is split where 512 bytes are left
    a=1 b=0.9995 c=0.0004 -> reserved 2
a large block is given whole where 1 MiB is left
    a=12 -a b=11 -> allocated 12
# 60 >= 40 + 20
an oversized request takes no block that is too much larger
    [max_split_size_mb:32] a=60 -a b=40 c=40.5 -> c a, reserved 100
# the 40 and the 34 go, largest first, since 40 are less than 60; the 20 stay
oversized blocks are given back before all that is cached
    [max_split_size_mb:32, 120 MiB] a=40 b=34 c=20 -a -b -c d=60
    -> reserved 80, num_alloc_retries 0, num_device_free 2
# 90 >= 50 + 20: not for this request, but enough to make room for it
one oversized block that is enough is given back alone
    [max_split_size_mb:32, 150 MiB] a=40 b=90 -a -b c=50 -> reserved 90, num_alloc_retries 0
# 66 MiB are reserved where 50 % of 100 are the threshold, so 16 are to be reclaimed; free are 20 since two requests
# and 22 since one: those older than 1.5 go, which is enough
old cached segments are freed above the threshold
    [garbage_collection_threshold:0.5,per_process_memory_fraction:0.5, 200 MiB]
    a=20 b=22 c=24 -a -b d=22 -d e=26 f=22 -> f b, reserved 72, num_device_free 1, num_alloc_retries 0
before a request is refused everything cached is given back once
    [100 MiB] a=60 -a b=80
    -> reserved 80, num_alloc_retries 1, num_ooms 0, num_device_alloc 2, num_device_free 1, num_sync_all_streams 1
# 20 are left, and nowhere 60 in a row: the 40 that are free are mapped elsewhere
a retry unmaps what is free for use at another place
    [expandable_segments:True, 100 MiB] a=40 b=40 -a c=60
    -> b 40, c 120, reserved 100, allocated 100, num_alloc_retries 1
# of 50 to 100 MiB the pages from 60 to 100
an emptied cache unmaps whole pages
    [expandable_segments:True] a=50 b=50 c=20 -b empty -> reserved 80, num_device_free 1
streams and pools have segments of their own, an eighth larger than the device
    [expandable_segments:True, 100 MiB] a=20 b=20/1 c=1 -> a 0, b 120, c 240
"""
"""A rule, and below it settings and the device's size, a program (see ``played``), and the figures after it: in MiB,
counts, or the place of another block."""


def rules() -> Iterator[Any]:
    text = re.sub(r"^#.*\n", "", RULES, flags=re.MULTILINE)
    for name, row in re.findall(r"^(\w.*)\n((?: +.*\n)+)", text, re.MULTILINE):
        made, program, expected = re.findall(r"^(?:\[(.*)\] )?(.*) -> (.*)$", " ".join(row.split()))[0]
        settings, capacity = re.findall(r"^(.*?)(?:, )?(?:(\d+) MiB)?$", made)[0]
        figures = dict(each.rsplit(" ", 1) for each in expected.split(", "))
        yield pytest.param(settings, int(capacity) if capacity else None, program, figures, id=name)


@pytest.mark.parametrize(("settings", "capacity_mib", "program", "expected"), rules())
def test_the_rule(settings: str, capacity_mib: int | None, program: str, expected: dict[str, str]) -> None:
    figures = played(allocator_of(settings, capacity_mib), program)
    assert {name: figures[name] for name in expected} == {
        name: figures[value] if value in figures else float(value) for name, value in expected.items()
    }


@pytest.mark.parametrize(("mib", "segment_mib"), [(1, 2), (1.001, 20), (9.99, 20), (10, 10), (10.1, 12)])
def test_a_request_that_no_cached_block_serves_takes_a_segment(mib: float, segment_mib: int) -> None:
    allocator = allocator_of()
    allocator.malloc(int(mib * MIB))
    assert allocator.reserved_bytes == segment_mib * MIB
    assert allocator.num_device_alloc == 1


def test_a_fraction_of_a_device_without_a_size_is_refused() -> None:
    with pytest.raises(ValueError, match="give total_bytes"):
        allocator_of("per_process_memory_fraction:0.5")


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


def test_sizes_are_written_as_torch_writes_them() -> None:
    sizes = (0, 1024, 1025, MIB, MIB + 1, 21 * MIB, GIB, GIB + 1, 2000 * GIB)
    assert ", ".join(map(format_size, sizes)) == (
        "0 bytes, 1024 bytes, 1.00 KiB, 1024.00 KiB, 1.00 MiB, 21.00 MiB, 1024.00 MiB, 1.00 GiB, 2000.00 GiB"
    )
