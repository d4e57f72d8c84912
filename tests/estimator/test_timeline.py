"""A timeline says of every point who holds what, and loses no peak however few points are left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import block, trace, traces

from autotrain_mem.estimator.memory import estimate_memory
from autotrain_mem.estimator.replay import Room
from autotrain_mem.estimator.timeline import HOLDERS, make_timeline
from autotrain_mem.types import Owner, Phase, Trace
from autotrain_mem.types.page import Holder, Timeline

ENDLESS = Room(capacity_bytes=None)


def draw(run: Trace, places: int = 1000, *, expandable_segments: bool = False) -> Timeline:
    return make_timeline(run, ENDLESS, expandable_segments=expandable_segments, name="step", places=places)


@given(run=traces(empties=True), places=st.integers(1, 8), expandable=st.booleans())
def test_thinning_loses_neither_peak_and_the_owners_sum_to_what_is_allocated(
    run: Trace, places: int, expandable: bool
) -> None:
    memory = estimate_memory(run, ENDLESS)
    thin, full = (draw(run, count, expandable_segments=expandable) for count in (places, 10**6))
    assert len(thin.event) <= 3 * places + 2
    allocated = [sum(column[point] for column in thin.owners.values()) for point in range(len(thin.event))]
    assert max(allocated) == allocated[thin.peak] == memory.peak_allocated_bytes
    assert {owner: column[thin.peak] for owner, column in thin.owners.items()} == {
        owner: memory.owners_at_peak[owner] for owner in thin.owners
    }
    assert max(thin.reserved_bytes) == memory.reserved.of(expandable_segments=expandable).peak_reserved_bytes
    of_event = dict(zip(full.event, full.reserved_bytes, strict=True))
    assert [of_event[event] for event in thin.event] == list(thin.reserved_bytes)


@given(run=traces())
def test_holders_are_the_modules_that_hold_most(run: Trace) -> None:
    timeline = draw(run)
    for point, event in enumerate(timeline.event):
        held: dict[tuple[Owner, str], int] = {}
        for each in run.events[: event + 1]:
            owned = run.blocks[abs(each) - 1]
            size = max(512, -(-owned.size_bytes // 512) * 512)
            key = (owned.owner, owned.module)
            held[key] = held.get(key, 0) + (size if each > 0 else -size)
        largest = sorted((size for size in held.values() if size), reverse=True)[:HOLDERS]
        named = timeline.holders[point]
        assert [holder.size_bytes for holder in named] == largest
        owners = list(timeline.owners)
        assert all(held[owners[holder.owner], timeline.modules[holder.module]] == holder.size_bytes for holder in named)


def test_a_module_that_allocates_again_is_named_once() -> None:
    logits = block(1024, Owner.ACTIVATIONS, "lm_head")
    run = trace([logits, logits], [1, -1, 2], [(0, Phase.FORWARD)])
    timeline = draw(run)
    assert timeline.holders == ((Holder(module=0, owner=0, size_bytes=1024),), (), timeline.holders[0])
    assert timeline.phases == ((Phase.FORWARD, 0),)
    with pytest.raises(ValueError, match="empty"):
        draw(trace([], []))
