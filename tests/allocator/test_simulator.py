"""Rules of the allocator, with figures worked out by hand, and ``PYTORCH_ALLOC_CONF`` as torch reads it."""

import re
from dataclasses import replace

import pytest

from autotrain_mem.allocator import settings as module
from autotrain_mem.allocator.segments import FIRST_ADDRESS
from autotrain_mem.allocator.settings import OLDER_VARIABLE, AllocatorSettings, environment_settings, parse_settings
from autotrain_mem.allocator.simulator import CachingAllocator, OutOfMemory, format_size
from autotrain_mem.support.units import GIB, MIB


def allocator_of(settings: str = "", capacity_mib: int | None = None) -> CachingAllocator:
    capacity = None if capacity_mib is None else capacity_mib * MIB
    return CachingAllocator(capacity, parse_settings(settings))


def played(allocator: CachingAllocator, program: str) -> dict[str, float]:
    """Plays a program; returns torch's statistics and the address of each block, in MiB.

    ``a=12`` allocates 12 MiB, ``a=12/1`` on stream 1; ``-a`` frees.
    """
    addresses: dict[str, int] = {}
    for step in program.split():
        name, _, taken = step.partition("=")
        if taken:
            mib, _, stream = taken.partition("/")
            addresses[name] = allocator.malloc(int(float(mib) * MIB), int(stream or 0))
        else:
            allocator.free(addresses[name.removeprefix("-")])
    places = {name: (address - FIRST_ADDRESS) / MIB for name, address in addresses.items()}
    held = {"reserved": allocator.reserved_bytes / MIB, "allocated": allocator.allocated_bytes / MIB}
    return allocator.memory_stats() | places | held


def test_only_allocated_addresses_and_0_can_be_freed_and_a_fraction_is_of_a_size() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(0))
    with pytest.raises(KeyError):
        allocator.free(FIRST_ADDRESS)
    with pytest.raises(ValueError, match="give total_bytes"):
        allocator_of("per_process_memory_fraction:0.5")


RULES = """
a small block with 512 bytes left is split
    a=1 b=0.9995 c=0.0004 -> reserved 2
a large block with 1 MiB left is not split
    a=12 -a b=11 -> allocated 12
# 60 >= 40 + 20
an oversized request takes no block that is much larger
    [max_split_size_mb:32] a=60 -a b=40 c=40.5 -> c a, reserved 100
# the 40 and the 34 are released, largest first, since 40 are less than 60; the 20 stay
oversized blocks are released before the whole cache
    [max_split_size_mb:32, 120 MiB] a=40 b=34 c=20 -a -b -c d=60
    -> reserved 80, num_alloc_retries 0, num_device_free 2
# 90 >= 50 + 20: too large for the request, but enough to make room for it
one sufficient oversized block is released alone
    [max_split_size_mb:32, 150 MiB] a=40 b=90 -a -b c=50 -> reserved 90, num_alloc_retries 0
# 66 MiB are reserved and the threshold is 50 % of 100, so 16 are to be reclaimed; 20 are free since two requests and 22
# since one, and those older than 1.5 suffice
old cached segments are released above the threshold
    [garbage_collection_threshold:0.5,per_process_memory_fraction:0.5, 200 MiB]
    a=20 b=22 c=24 -a -b d=22 -d e=26 f=22 -> f b, reserved 72, num_device_free 1, num_alloc_retries 0
each stream and pool has a segment of its own, an eighth larger than the device
    [expandable_segments:True, 100 MiB] a=20 b=20/1 c=1 -> a 0, b 120, c 240
# torch 2.13.0: the free 60 MiB exceed the limit of 32. https://github.com/pytorch/pytorch/pull/193400 would reuse them
with max_split_size_mb an expandable segment grows although it has room
    [expandable_segments:True,max_split_size_mb:32, 200 MiB] a=60 b=2 -a c=20 -> c 62, reserved 100
"""
"""A rule, then settings and the device's size, a program (see ``played``), and figures: MiB, counts, or the address of
another block. The recorded answers cover the others: a retry, and pages that are unmapped."""


def test_the_allocator_keeps_to_every_rule() -> None:
    text = re.sub(r"^#.*\n", "", RULES, flags=re.MULTILINE)
    for rule, row in re.findall(r"^(\w.*)\n((?: +.*\n)+)", text, re.MULTILINE):
        made, program, expected = re.findall(r"^(?:\[(.*)\] )?(.*) -> (.*)$", " ".join(row.split()))[0]
        settings, capacity = re.findall(r"^(.*?)(?:, )?(?:(\d+) MiB)?$", made)[0]
        figures = played(allocator_of(settings, int(capacity) if capacity else None), program)
        for name, value in (each.rsplit(" ", 1) for each in expected.split(", ")):
            assert figures[name] == (figures[value] if value in figures else float(value)), (rule, name)


def test_the_size_of_a_segment_follows_from_the_request() -> None:
    sizes = {1: 2, 1.001: 20, 9.99: 20, 10: 10, 10.1: 12}
    assert {mib: played(allocator_of(), f"a={mib}")["reserved"] for mib in sizes} == sizes


def test_memory_outside_the_allocator_is_in_the_message() -> None:
    """The recorded answers contain the whole message without it."""
    settings = parse_settings("per_process_memory_fraction:0.75")
    allocator = CachingAllocator(3 * GIB, settings, total_bytes=4 * GIB, outside_bytes=300 * MIB)
    allocator.malloc(2 * GIB)
    words = "is free. Including non-PyTorch memory, this process has 2.29 GiB memory in use. 3.00 GiB allowed; Of the "
    with pytest.raises(OutOfMemory, match=words):
        allocator.malloc(2 * GIB + 1)


def test_sizes_are_written_as_torch_writes_them() -> None:
    sizes = (0, 1024, 1025, MIB, MIB + 1, 21 * MIB, GIB, GIB + 1, 2000 * GIB)
    assert ", ".join(map(format_size, sizes)) == (
        "0 bytes, 1024 bytes, 1.00 KiB, 1024.00 KiB, 1.00 MiB, 21.00 MiB, 1024.00 MiB, 1.00 GiB, 2000.00 GiB"
    )


DEFAULTS = AllocatorSettings()


def test_an_option_is_read() -> None:
    smaller = {"max_split_bytes": 15 * MIB, "large_segment_bytes": 11 * MIB}
    for text, changed in (
        ("", {}),
        (" , ", {}),
        ("expandable_segments:False", {}),
        ("max_split_size_mb:15,large_segment_size_mb:11", smaller),
        ("per_process_memory_fraction:0", {"per_process_memory_fraction": 0.0}),
        ("backend:native", {}),
        (",".join(f"{name}:1" for name in sorted(module._PLACES_NOTHING)), {}),
        ("max_split_size_mb:64,max_split_size_mb:128", {"max_split_bytes": 128 * MIB}),  # the last counts
        (
            " large_segment_size_mb:11,, max_split_size_mb : 64\n,",
            {"large_segment_bytes": 11 * MIB, "max_split_bytes": 64 * MIB},
        ),
    ):
        assert parse_settings(text) == replace(DEFAULTS, **changed), text


def test_what_torch_refuses_is_refused_by_its_name() -> None:
    for text, said in (
        ("expandable_segment:True", "expandable_segment is not an option of the allocator"),
        ("expandable_segments", "expandable_segments needs a value: expandable_segments:VALUE"),
        ("expandable_segments:true", "expandable_segments is True or False, not true"),
        ("max_split_size_mb:19", "max_split_size_mb must be 20 or more, not 19"),
        ("max_split_size_mb:1.5", "max_split_size_mb takes a whole number, not 1.5"),
        ("max_non_split_rounding_mb:19", "max_non_split_rounding_mb must be 20 or more, not 19"),
        ("large_segment_size_mb:10", "large_segment_size_mb must be 11 or more, not 10"),
        ("large_segment_size_mb:40,max_split_size_mb:22", "max_split_size_mb must be 40 or more, not 22"),
        ("garbage_collection_threshold:0", "garbage_collection_threshold takes a share between 0 and 1, not 0"),
        ("garbage_collection_threshold:nan", "garbage_collection_threshold takes a share between 0 and 1, not nan"),
        ("per_process_memory_fraction:1.1", "per_process_memory_fraction takes a share from 0 to 1, not 1.1"),
        ("roundup_power2_divisions:[1:2,>:4]", "roundup_power2_divisions is not supported; remove it"),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync is another allocator; only backend:native is simulated"),
    ):
        with pytest.raises(ValueError, match=r".") as raised:
            parse_settings(f"expandable_segments:True,{text}")
        assert str(raised.value) == said


def test_the_older_variable_counts_if_both_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (module.NEWER_VARIABLE, OLDER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    both = {module.NEWER_VARIABLE: "expandable_segments:True", OLDER_VARIABLE: "max_split_size_mb:64"}
    assert environment_settings(both) == AllocatorSettings(max_split_bytes=64 * MIB)
    assert environment_settings({**both, OLDER_VARIABLE: ""}) == AllocatorSettings(grows=True)
    assert environment_settings({"PATH": "/bin"}) == DEFAULTS
