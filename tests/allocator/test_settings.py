"""``PYTORCH_ALLOC_CONF`` is read as torch reads it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotrain_mem.allocator.blocks import round_size, round_size_by
from autotrain_mem.allocator.settings import (
    _PLACES_NOTHING,
    NEWER_VARIABLE,
    OLDER_VARIABLE,
    AllocatorSettings,
    environment_settings,
    parse_settings,
)
from autotrain_mem.support.units import GIB, MIB

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
        (",".join(f"{name}:1" for name in sorted(_PLACES_NOTHING)), {}),
        ("max_split_size_mb:64,max_split_size_mb:128", {"max_split_bytes": 128 * MIB}),  # the last counts
        (
            " roundup_power2_divisions:[1:2,>:4],, max_split_size_mb : 64\n,",
            {"roundup_power2_divisions": (2,) + (4,) * 15, "max_split_bytes": 64 * MIB},
        ),
    ):
        assert parse_settings(text) == replace(DEFAULTS, **changed), text


def test_divisions_may_differ_by_size() -> None:
    """The first number also applies below its size, and that of ">" above the last size."""
    divisions = {
        "[256:1,512:2,1024:4,>:8]": (1,) * 9 + (2, 4) + (8,) * 5,
        "[1:2,4:8,32:1,>:4]": (2, 0, 8, 0, 0, 1) + (4,) * 10,
        "[4:2]": (2, 2, 2) + (0,) * 13,
        "[1:0,2:4]": (0, 4) + (0,) * 14,
        "[65536:2]": (2,) * 16,
    }
    for listed, expected in divisions.items():
        assert parse_settings(f"roundup_power2_divisions:{listed}").roundup_power2_divisions == expected, listed


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
        ("roundup_power2_divisions:3", "roundup_power2_divisions takes powers of two, not 3"),
        ("roundup_power2_divisions:[4:3]", "roundup_power2_divisions takes powers of two, not 3"),
        ("roundup_power2_divisions:[4]", "roundup_power2_divisions takes a whole number, not "),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync is another allocator, which is not simulated; native is"),
    ):
        with pytest.raises(ValueError, match=r".") as raised:
            parse_settings(f"expandable_segments:True,{text}")
        assert str(raised.value) == said


def test_the_older_variable_counts_if_both_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (NEWER_VARIABLE, OLDER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    both = {NEWER_VARIABLE: "expandable_segments:True", OLDER_VARIABLE: "max_split_size_mb:64"}
    assert environment_settings(both) == AllocatorSettings(max_split_bytes=64 * MIB)
    assert environment_settings({**both, OLDER_VARIABLE: ""}) == AllocatorSettings(grows=True)
    assert environment_settings({"PATH": "/bin"}) == DEFAULTS


@given(st.integers(1, 64 * GIB), st.sampled_from(("1", "2", "8", "[1:4,64:2,>:1]")))
def test_requests_are_rounded_up_to_blocks_less_than_twice_as_large(requested: int, divisions: str) -> None:
    settings = parse_settings(f"roundup_power2_divisions:{divisions}")
    size = round_size_by(settings, requested)
    assert requested <= size < max(2 * requested, requested + 512)
    assert size % 512 == 0
    assert round_size_by(settings, size) == size
    assert round_size(requested) == -(-requested // 512) * 512 <= size
