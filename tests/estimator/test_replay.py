"""The peak of a trace, when it is, and to whom its bytes belong: parts always sum to totals."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotrain_mem.allocator.allocated import AllocatedBytes
from autotrain_mem.allocator.rounding import round_size
from autotrain_mem.estimator.replay import LARGEST_MODULES, RESERVE_ALLOWANCE_FRACTION, estimate_memory
from autotrain_mem.spec import Block, Owner, Phase, Trace


def block(size_bytes: int, owner: Owner = Owner.TEMPORARY, module: str = "") -> Block:
    return Block(size_bytes=size_bytes, owner=owner, module=module)


def trace(blocks: list[Block], events: list[int], phase_starts: list[tuple[int, Phase]] | None = None) -> Trace:
    return Trace(
        blocks=tuple(blocks),
        events=array("q", events),
        phase_starts=tuple(phase_starts or [(0, Phase.LOAD)]),
        operators=len(events),
        seconds=1.5,
        not_counted=("the workspace of cuBLAS",),
    )


def test_every_block_counts_in_multiples_of_512_bytes() -> None:
    found = estimate_memory(trace([block(1), block(513)], [1, 2]))
    assert found.peak_allocated_bytes == 512 + 1024


def test_the_peak_is_the_largest_sum_of_what_is_alive_at_once() -> None:
    blocks = [block(512), block(1024), block(2048)]
    assert estimate_memory(trace(blocks, [1, 2, -1, -2, 3])).peak_allocated_bytes == 2048
    assert estimate_memory(trace(blocks, [1, 2, -1, 3, -2])).peak_allocated_bytes == 1024 + 2048
    assert estimate_memory(trace(blocks, [1, 2, 3])).peak_allocated_bytes == 512 + 1024 + 2048


def test_the_bytes_at_the_peak_belong_to_whoever_is_alive_then() -> None:
    weights = block(1024, Owner.WEIGHTS, "layer.weight")
    dead = block(4096, Owner.ACTIVATIONS, "early")
    alive = block(8192, Owner.ACTIVATIONS, "late")
    found = estimate_memory(trace([weights, dead, alive], [1, 2, -2, 3, -3]))
    expected = dict.fromkeys(Owner, 0) | {Owner.WEIGHTS: 1024, Owner.ACTIVATIONS: 8192}
    assert found.owners_at_peak == expected
    assert found.modules_at_peak == (("late", 8192),)


def test_the_first_of_two_equal_peaks_is_the_peak() -> None:
    blocks = [block(512, Owner.ACTIVATIONS), block(512, Owner.TEMPORARY)]
    starts = [(0, Phase.LOAD), (0, Phase.FORWARD), (2, Phase.BACKWARD)]
    found = estimate_memory(trace(blocks, [1, -1, 2], starts))
    assert found.peak_phase is Phase.FORWARD
    assert found.owners_at_peak[Owner.ACTIVATIONS] == 512


def test_phases_have_their_own_peaks_in_the_order_they_were_met() -> None:
    blocks = [block(1024, Owner.WEIGHTS), block(2048), block(512), block(512)]
    starts = [(0, Phase.LOAD), (1, Phase.FORWARD), (3, Phase.BACKWARD), (5, Phase.FORWARD)]
    found = estimate_memory(trace(blocks, [1, 2, -2, 3, -3, 4], starts))
    assert list(found.phases.items()) == [(Phase.LOAD, 1024), (Phase.FORWARD, 3072), (Phase.BACKWARD, 1536)]
    assert found.peak_phase is Phase.FORWARD


def test_modules_are_listed_by_size_and_only_what_their_forwards_made() -> None:
    sizes = {f"layers.{index}": 512 * (index + 1) for index in range(LARGEST_MODULES + 2)}
    blocks = [block(size, Owner.ACTIVATIONS, name) for name, size in sizes.items()]
    blocks += [block(512, Owner.TEMPORARY, "layers.0"), block(99 * 512, Owner.WEIGHTS, "embedding"), block(99 * 512)]
    found = estimate_memory(trace(blocks, list(range(1, len(blocks) + 1))))
    assert found.modules_at_peak == tuple((f"layers.{index}", 512 * (index + 1)) for index in (6, 5, 4, 3, 2))


def test_the_allowance_for_reserved_bytes_is_a_share_of_the_peak() -> None:
    found = estimate_memory(trace([block(1_000_448)], [1]))
    assert found.reserve_allowance_bytes == int(1_000_448 * RESERVE_ALLOWANCE_FRACTION)


def test_what_is_not_counted_and_the_time_are_passed_on() -> None:
    found = estimate_memory(trace([block(1)], [1]))
    assert found.not_counted == ("the workspace of cuBLAS",)
    assert found.rehearsal_seconds == 1.5


def test_an_empty_trace_is_an_error_and_not_a_peak_of_nothing() -> None:
    with pytest.raises(ValueError, match="empty"):
        estimate_memory(trace([], []))


# -- any run -------------------------------------------------------------------------------------------------------


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any order of births and deaths, cut into phases anywhere."""
    owners, modules = st.sampled_from(list(Owner)), st.sampled_from(["", "model.layers.0", "model.layers.1", "lm_head"])
    sizes = draw(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=30))
    blocks = [block(size, draw(owners), draw(modules)) for size in sizes]
    events: list[int] = []
    alive: list[int] = []
    for number in range(1, len(blocks) + 1):
        events.append(number)
        alive.append(number)
        while alive and draw(st.booleans()):
            events.append(-alive.pop(draw(st.integers(0, len(alive) - 1))))
    cuts = sorted(draw(st.lists(st.integers(0, len(events)), max_size=6)))
    starts = [(0, Phase.LOAD), *((cut, draw(st.sampled_from(list(Phase)))) for cut in cuts)]
    return trace(blocks, events, starts)


@given(traces())
def test_owners_add_up_to_the_peak_exactly(run: Trace) -> None:
    found = estimate_memory(run)
    assert sum(found.owners_at_peak.values()) == found.peak_allocated_bytes
    assert set(found.owners_at_peak) == set(Owner)


@given(traces())
def test_the_largest_phase_is_the_peak_and_the_peaks_phase(run: Trace) -> None:
    found = estimate_memory(run)
    assert max(found.phases.values()) == found.peak_allocated_bytes
    assert found.phases[found.peak_phase] == found.peak_allocated_bytes


@given(traces())
def test_modules_are_part_of_what_activations_and_temporaries_hold(run: Trace) -> None:
    found = estimate_memory(run)
    held = found.owners_at_peak[Owner.ACTIVATIONS] + found.owners_at_peak[Owner.TEMPORARY]
    assert sum(size for _, size in found.modules_at_peak) <= held


@given(traces())
def test_a_replay_says_what_the_allocator_would_have_counted(run: Trace) -> None:
    allocated = AllocatedBytes()
    for event in run.events:
        if event > 0:
            allocated.allocate(event, run.blocks[event - 1].size_bytes)
        else:
            allocated.free(-event)
    assert estimate_memory(run).peak_allocated_bytes == allocated.peak_bytes


@given(traces())
def test_the_peak_lies_between_the_largest_block_and_all_of_them(run: Trace) -> None:
    sizes = [round_size(one.size_bytes) for one in run.blocks]
    assert max(sizes) <= estimate_memory(run).peak_allocated_bytes <= sum(sizes)


@given(traces())
def test_a_trace_that_went_to_another_process_and_back_is_the_same(run: Trace) -> None:
    assert Trace.from_json(run.to_json()) == run
    assert estimate_memory(Trace.from_json(run.to_json())) == estimate_memory(run)


@given(traces())
def test_walking_a_trace_meets_every_event_with_its_block_and_its_phase(run: Trace) -> None:
    walked = list(run.walk())
    assert [sign for _, sign, _ in walked] == [1 if event > 0 else -1 for event in run.events]
    assert [one for _, _, one in walked] == [run.blocks[abs(event) - 1] for event in run.events]
    for index, (phase, _, _) in enumerate(walked):
        assert phase is [started for start, started in run.phase_starts if start <= index][-1]
