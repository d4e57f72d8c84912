"""The peak of a trace, when it is, and to whom its bytes belong: parts always sum to totals."""

import pytest
from hypothesis import given
from traces import block, trace, traces

from autotrain_mem.allocator.blocks import round_size
from autotrain_mem.estimator.memory import LARGEST_MODULES, estimate_memory
from autotrain_mem.estimator.replay import DeviceCapacity, reserve
from autotrain_mem.support.units import MIB
from autotrain_mem.types import MemoryEstimate, Owner, Phase, Trace
from autotrain_mem.types.trace import CACHE_EMPTIED

ENDLESS = DeviceCapacity(capacity_bytes=None)


def estimate(run: Trace) -> MemoryEstimate:
    return estimate_memory(run, ENDLESS)


def test_the_bytes_at_the_peak_belong_to_whoever_is_alive_then() -> None:
    weights = block(1024, Owner.WEIGHTS, "layer.weight")
    dead = block(4096, Owner.ACTIVATIONS, "early")
    alive = block(8192, Owner.ACTIVATIONS, "late")
    memory = estimate(trace([weights, dead, alive], [1, 2, -2, CACHE_EMPTIED, 3, -3]))
    expected = dict.fromkeys(Owner, 0) | {Owner.WEIGHTS: 1024, Owner.ACTIVATIONS: 8192}
    assert memory.owners_at_peak == expected
    assert memory.modules_at_peak == (("late", 8192),)


def test_the_first_of_two_equal_peaks_is_the_peak_and_phases_have_their_own_in_the_order_they_were_met() -> None:
    blocks = [block(512, Owner.ACTIVATIONS), block(512, Owner.TEMPORARY)]
    starts = [(0, Phase.LOAD), (0, Phase.FORWARD), (2, Phase.BACKWARD)]
    memory = estimate(trace(blocks, [1, -1, 2], starts))
    assert memory.peak_phase is Phase.FORWARD
    assert memory.owners_at_peak[Owner.ACTIVATIONS] == 512
    with pytest.raises(ValueError, match="empty"):
        estimate(trace([], []))
    blocks = [block(1024, Owner.WEIGHTS), block(2048), block(512), block(512)]
    starts = [(0, Phase.LOAD), (1, Phase.FORWARD), (3, Phase.BACKWARD), (5, Phase.FORWARD)]
    memory = estimate(trace(blocks, [1, 2, -2, 3, -3, 4], starts))
    assert list(memory.phases.items()) == [(Phase.LOAD, 1024), (Phase.FORWARD, 3072), (Phase.BACKWARD, 1536)]


def test_modules_are_listed_by_size_and_only_what_their_forwards_made() -> None:
    sizes = {f"layers.{index}": 512 * (index + 1) for index in range(LARGEST_MODULES + 2)}
    blocks = [block(size, Owner.ACTIVATIONS, name) for name, size in sizes.items()]
    blocks += [block(512, Owner.TEMPORARY, "layers.0"), block(99 * 512, Owner.WEIGHTS, "embedding"), block(99 * 512)]
    memory = estimate(trace(blocks, list(range(1, len(blocks) + 1))))
    assert memory.modules_at_peak == tuple((f"layers.{index}", 512 * (index + 1)) for index in (6, 5, 4, 3, 2))


@given(traces(largest=48 * MIB, empties=True))
def test_parts_add_up_to_the_peak_exactly(run: Trace) -> None:
    memory = estimate(run)
    peak = memory.peak_allocated_bytes
    assert sum(memory.owners_at_peak.values()) == max(memory.phases.values()) == peak
    assert memory.phases[memory.peak_phase] == peak
    assert set(memory.owners_at_peak) == set(Owner)
    held = memory.owners_at_peak[Owner.ACTIVATIONS] + memory.owners_at_peak[Owner.TEMPORARY]
    assert sum(size for _, size in memory.modules_at_peak) <= held
    sizes = [round_size(one.size_bytes) for one in run.blocks]
    assert max(sizes) <= peak <= sum(sizes)
    for mode, expandable in ((memory.reserved.native, False), (memory.reserved.expandable_segments, True)):
        assert mode == reserve(run, ENDLESS, grows=expandable)
        assert peak <= mode.peak_reserved_bytes
        assert 0 <= mode.slack_bytes < mode.peak_reserved_bytes
        assert mode.fits
