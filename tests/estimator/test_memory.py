"""The peak of a trace, when it is, and to whom its bytes belong: parts always sum to totals."""

from __future__ import annotations

import pytest
from hypothesis import given
from traces import block, run_of, trace, traces

from autotrain_mem.allocator.rounding import round_size
from autotrain_mem.allocator.simulator import CachingAllocator
from autotrain_mem.estimator.memory import LARGEST_MODULES, estimate_memory
from autotrain_mem.estimator.replay import Room, reserve
from autotrain_mem.spec import MemoryEstimate, Owner, Phase, Trace, codec
from autotrain_mem.spec.trace import CACHE_EMPTIED
from autotrain_mem.units import MIB

ENDLESS = Room(capacity_bytes=None)


def estimate(run: Trace) -> MemoryEstimate:
    return estimate_memory(run, ENDLESS)


def test_every_block_counts_in_multiples_of_512_bytes() -> None:
    assert estimate(trace([block(1), block(513)], [1, 2])).peak_allocated_bytes == 512 + 1024


def test_the_peak_is_the_largest_sum_of_what_is_alive_at_once() -> None:
    blocks = [block(512), block(1024), block(2048)]
    assert estimate(trace(blocks, [1, 2, -1, -2, 3])).peak_allocated_bytes == 2048
    assert estimate(trace(blocks, [1, 2, -1, 3, -2])).peak_allocated_bytes == 1024 + 2048
    assert estimate(trace(blocks, [1, 2, 3])).peak_allocated_bytes == 512 + 1024 + 2048


def test_the_bytes_at_the_peak_belong_to_whoever_is_alive_then() -> None:
    weights = block(1024, Owner.WEIGHTS, "layer.weight")
    dead = block(4096, Owner.ACTIVATIONS, "early")
    alive = block(8192, Owner.ACTIVATIONS, "late")
    found = estimate(trace([weights, dead, alive], [1, 2, -2, CACHE_EMPTIED, 3, -3]))
    expected = dict.fromkeys(Owner, 0) | {Owner.WEIGHTS: 1024, Owner.ACTIVATIONS: 8192}
    assert found.owners_at_peak == expected
    assert found.modules_at_peak == (("late", 8192),)


def test_the_first_of_two_equal_peaks_is_the_peak() -> None:
    blocks = [block(512, Owner.ACTIVATIONS), block(512, Owner.TEMPORARY)]
    starts = [(0, Phase.LOAD), (0, Phase.FORWARD), (2, Phase.BACKWARD)]
    found = estimate(trace(blocks, [1, -1, 2], starts))
    assert found.peak_phase is Phase.FORWARD
    assert found.owners_at_peak[Owner.ACTIVATIONS] == 512


def test_phases_have_their_own_peaks_in_the_order_they_were_met() -> None:
    blocks = [block(1024, Owner.WEIGHTS), block(2048), block(512), block(512)]
    starts = [(0, Phase.LOAD), (1, Phase.FORWARD), (3, Phase.BACKWARD), (5, Phase.FORWARD)]
    found = estimate(trace(blocks, [1, 2, -2, 3, -3, 4], starts))
    assert list(found.phases.items()) == [(Phase.LOAD, 1024), (Phase.FORWARD, 3072), (Phase.BACKWARD, 1536)]
    assert found.peak_phase is Phase.FORWARD


def test_modules_are_listed_by_size_and_only_what_their_forwards_made() -> None:
    sizes = {f"layers.{index}": 512 * (index + 1) for index in range(LARGEST_MODULES + 2)}
    blocks = [block(size, Owner.ACTIVATIONS, name) for name, size in sizes.items()]
    blocks += [block(512, Owner.TEMPORARY, "layers.0"), block(99 * 512, Owner.WEIGHTS, "embedding"), block(99 * 512)]
    found = estimate(trace(blocks, list(range(1, len(blocks) + 1))))
    assert found.modules_at_peak == tuple((f"layers.{index}", 512 * (index + 1)) for index in (6, 5, 4, 3, 2))


def test_one_call_says_what_both_modes_reserve() -> None:
    run = run_of([40, 40, 80], [1, 2, -1, -2, 3])
    found = estimate(run)
    assert found.reserved.native == reserve(run, ENDLESS, expandable_segments=False)
    assert found.reserved.expandable_segments == reserve(run, ENDLESS, expandable_segments=True)
    native, expandable = found.reserved.native, found.reserved.expandable_segments
    assert (native.peak_reserved_bytes, expandable.peak_reserved_bytes) == (160 * MIB, 80 * MIB)
    assert found.peak_allocated_bytes == 80 * MIB


def test_what_is_not_counted_and_the_time_are_passed_on() -> None:
    found = estimate(trace([block(1)], [1]))
    assert found.not_counted == ("the workspace of cuBLAS",)
    assert found.rehearsal_seconds == 1.5


def test_an_empty_trace_is_an_error_and_not_a_peak_of_nothing() -> None:
    with pytest.raises(ValueError, match="empty"):
        estimate(trace([], []))


# -- any run -------------------------------------------------------------------------------------------------------


@given(traces(empties=True))
def test_owners_add_up_to_the_peak_exactly(run: Trace) -> None:
    found = estimate(run)
    assert sum(found.owners_at_peak.values()) == found.peak_allocated_bytes
    assert set(found.owners_at_peak) == set(Owner)


@given(traces(empties=True))
def test_the_largest_phase_is_the_peak_and_the_peaks_phase(run: Trace) -> None:
    found = estimate(run)
    assert max(found.phases.values()) == found.peak_allocated_bytes
    assert found.phases[found.peak_phase] == found.peak_allocated_bytes


@given(traces())
def test_modules_are_part_of_what_activations_and_temporaries_hold(run: Trace) -> None:
    found = estimate(run)
    held = found.owners_at_peak[Owner.ACTIVATIONS] + found.owners_at_peak[Owner.TEMPORARY]
    assert sum(size for _, size in found.modules_at_peak) <= held


@given(traces())
def test_where_no_end_of_a_block_is_lost_the_allocator_counts_the_same(run: Trace) -> None:
    """Blocks of up to 1 MiB are cut to size; larger ones may be given up to 1 MiB more."""
    allocator = CachingAllocator()
    addresses: dict[int, int] = {}
    for event in run.events:
        if event > 0:
            addresses[event] = allocator.malloc(run.blocks[event - 1].size_bytes)
        else:
            allocator.free(addresses.pop(-event))
    assert estimate(run).peak_allocated_bytes == allocator.peak_allocated_bytes


@given(traces())
def test_the_peak_lies_between_the_largest_block_and_all_of_them(run: Trace) -> None:
    sizes = [round_size(one.size_bytes) for one in run.blocks]
    assert max(sizes) <= estimate(run).peak_allocated_bytes <= sum(sizes)


@given(traces(largest=48 * MIB, empties=True))
def test_what_is_allocated_is_part_of_what_either_mode_reserves(run: Trace) -> None:
    found = estimate(run)
    for mode in (found.reserved.native, found.reserved.expandable_segments):
        assert found.peak_allocated_bytes <= mode.peak_reserved_bytes
        assert 0 <= mode.slack_bytes < mode.peak_reserved_bytes
        assert mode.fits


@given(traces(empties=True))
def test_a_trace_that_went_to_another_process_and_back_is_the_same(run: Trace) -> None:
    assert codec.from_json(Trace, codec.to_json(run)) == run
    assert estimate(codec.from_json(Trace, codec.to_json(run))) == estimate(run)


@given(traces(empties=True))
def test_walking_a_trace_meets_every_birth_and_death_with_its_block_and_its_phase(run: Trace) -> None:
    walked = list(run.walk())
    events = [(index, event) for index, event in enumerate(run.events) if event != CACHE_EMPTIED]
    assert [sign for _, sign, _ in walked] == [1 if event > 0 else -1 for _, event in events]
    assert [one for _, _, one in walked] == [run.blocks[abs(event) - 1] for _, event in events]
    for (index, _), (phase, _, _) in zip(events, walked, strict=True):
        assert phase is [started for start, started in run.phase_starts if start <= index][-1]
