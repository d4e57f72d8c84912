"""Each rule of the allocator by numbers worked out by hand. Addresses count from the first segment's."""

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

SIZES = st.integers(0, 100 * GIB)


def allocator_of(settings: str = "", capacity_mib: int | None = None, total_mib: int | None = None) -> CachingAllocator:
    capacity, total = (None if each is None else each * MIB for each in (capacity_mib, total_mib))
    return CachingAllocator(capacity, parse_settings(settings), total_bytes=total)


def take(allocator: CachingAllocator, mib: float, stream: int = 0) -> int:
    return allocator.malloc(int(mib * MIB), stream)


def played(allocator: CachingAllocator, program: str) -> dict[str, float]:
    """Plays a program; returns torch's statistics, sums of its snapshot, and where each block lies from the first
    segment on, bytes in MiB. ``split`` counts the free blocks beside others.

    ``a=12`` takes 12 MiB, ``a=12/1`` on stream 1, ``a=12-`` and ``a=12+`` 512 bytes less and more; ``!30`` is refused;
    ``-a`` frees, ``a@1`` is used on stream 1, ``events`` are done, ``empty`` empties the cache.
    """
    addresses: dict[str, int] = {}
    for step in program.split():
        name, sign, rest = (step[1:], step[0], "") if step[0] in "-!" else re.split("([=@]|$)", step, maxsplit=1)
        if sign == "=":
            size, _, stream = rest.partition("/")
            beside = {"-": -512, "+": 512}.get(size[-1], 0)
            addresses[name] = allocator.malloc(int(float(size.rstrip("-+")) * MIB) + beside, int(stream or 0))
        elif sign == "-":
            allocator.free(addresses[name])
        elif sign == "@":
            allocator.record_stream(addresses[name], int(rest))
        elif sign == "!":
            with pytest.raises(OutOfMemory):
                take(allocator, float(name))
        else:
            {"events": allocator.complete_events, "empty": allocator.empty_cache}[name]()
    places = {name: (address - FIRST_ADDRESS) / MIB for name, address in addresses.items()}
    segments = allocator.segments()
    sums = {name: sum(each[f"{name}_size"] for each in segments) / MIB for name in ("active", "requested")}
    states = [block["state"] for each in segments if len(each["blocks"]) > 1 for block in each["blocks"]]
    counts = {"split": states.count("inactive"), "small": sum(each["segment_type"] == "small" for each in segments)}
    held = {"reserved": allocator.reserved_bytes / MIB, "allocated": allocator.allocated_bytes / MIB}
    return allocator.memory_stats() | places | sums | counts | held


@given(SIZES)
def test_a_block_is_the_smallest_multiple_of_512_that_holds_the_request(requested: int) -> None:
    size = round_size(requested)
    assert size % MIN_BLOCK_BYTES == 0
    assert size >= max(requested, 1)
    assert size - MIN_BLOCK_BYTES < max(requested, 1)


@given(SIZES.filter(bool))
def test_an_allocator_counts_the_rounded_size_and_the_requested_one(requested: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(requested)
    surplus = allocator.allocated_bytes - round_size(requested)
    assert 0 <= surplus <= MIB  # the end of a segment that is not worth cutting off
    assert allocator.segments()[0]["requested_size"] == requested


def test_of_nothing_nothing_is_counted_and_its_address_may_be_freed() -> None:
    allocator = CachingAllocator()
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert allocator.peak_allocated_bytes == 0
    with pytest.raises(KeyError):
        allocator.free(FIRST_ADDRESS)


RULES = """
# -- segments and best fit
requests of up to 1 MiB share segments of their own
    a=1.5 b=1 c=0.5 d=0.5 e=0.25 -> reserved 24, small 2
the smallest block that is large enough is taken
    [large_segment_size_mb:100] a=8 x=2 b=5 y=2 c=6 z=2 -a -b -c d=4.5 -> d b
blocks of another stream are not taken
    a=12 -a b=12/1 -> reserved 24

# -- splitting
a small block is split where 512 bytes are left
    a=1 b=1- -> split 1, reserved 2
a large block is given whole where 1 MiB is left
    a=12 -a b=11 -> allocated 12, requested 11
a large block is split where more than 1 MiB is left
    a=12 -a b=11- -> allocated 10.99951171875, split 1

# -- max_split_size_mb
# 30 are below the limit; 40 are at most 20 too large for 33, and given whole
an oversized block is neither split nor given to a smaller request
    [max_split_size_mb:32] a=40 -a b=30 c=33 -> c a, reserved 70, allocated 70
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

# -- garbage collection and retries
# 66 MiB are reserved where 50 % of 100 are the threshold, so 16 are to be reclaimed; free are 20 since two requests
# and 22 since one: those older than 1.5 go, which is enough
old cached segments are freed above the threshold
    [garbage_collection_threshold:0.5,per_process_memory_fraction:0.5, 200 MiB]
    a=20 b=22 c=24 -a -b d=22 -d e=26 f=22 -> f b, reserved 72, num_device_free 1, num_alloc_retries 0
before a request is refused everything cached is given back once
    [100 MiB] a=60 -a b=80
    -> reserved 80, num_alloc_retries 1, num_ooms 0, num_device_alloc 2, num_device_free 1, num_sync_all_streams 1

# -- other streams and empty_cache
a block that another stream uses stays active
    a=12 a@1 -a -> allocated 0, active 12, requested 12
a block is free once the other stream is done and the next request finds out
    a=12 a@1 -a b=12 events -> active 24
a block waits for each stream that uses it but its own
    a=12 b=12 a@0 b@1 b@2 b@2 -a -b -> active 12
a retry waits for all streams
    [30 MiB] a=20 a@1 -a b=24 -> reserved 24, num_alloc_retries 1
an emptied cache keeps segments of which something is in use
    a=12 b=4 c=4 d=0+ -a -b empty -> reserved 22

# -- expandable segments
an expandable segment grows by pages of 20 or of 2 MiB
    [expandable_segments:True] a=1.5 b=18.5 c=41 d=0+ -> reserved 82, num_device_alloc 3
# 5 MiB were free, two more pages hold the other 25
a request starts in the free end of what is mapped
    [expandable_segments:True] a=15 b=30 -> b 15, reserved 60
# of 50 to 100 MiB the pages from 60 to 100
an emptied cache unmaps whole pages
    [expandable_segments:True] a=50 b=50 c=20 -b empty -> reserved 80, num_device_free 1
# the 10 MiB that stayed, and one page
a request maps the lowest pages again
    [expandable_segments:True] a=50 b=50 c=20 -b empty d=15 -a e=45 -> d 50, e 0, reserved 100
# 20 are left, and nowhere 60 in a row: the 40 that are free are mapped elsewhere
a retry unmaps what is free for use at another place
    [expandable_segments:True, 100 MiB] a=40 b=40 -a c=60
    -> b 40, c 120, reserved 100, allocated 100, num_alloc_retries 1
two neighbours in an expandable segment do
    [expandable_segments:True] a=40 b=40 -a -b c=80 -> reserved 80
# the last 5 MiB before what is not mapped count with all of it, so 8 in the middle fit better
of expandable blocks the one that can grow least is taken
    [expandable_segments:True] a=8 b=7 -a c=4 -> c 0, reserved 20
streams and pools have segments of their own, an eighth larger than the device
    [expandable_segments:True, 100 MiB] a=20 b=20/1 c=1 -> a 0, b 120, c 240
a segment that is all unmapped is given up
    [expandable_segments:True, 100 MiB] a=20 -a empty b=20 -> b 120
a request beyond a whole segment is refused
    [expandable_segments:True, 100 MiB] !300 -> reserved 0, num_ooms 1
"""
"""A rule, and below it settings and the device's size, a program (see ``played``), and the figures after it: in MiB,
counts, or the place of another block. Segments of 100 MiB hold all, so that 2 MiB in use keep the free blocks apart."""


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


@pytest.mark.parametrize(
    ("mib", "segment_mib"),
    [(1 / 2048, 2), (1, 2), (1.001, 20), (9.99, 20), (10, 10), (10.1, 12), (20.5, 22), (33, 34), (1000.5, 1002)],
)
def test_a_request_that_no_cached_block_serves_takes_a_segment(mib: float, segment_mib: int) -> None:
    allocator = allocator_of()
    take(allocator, mib)
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
