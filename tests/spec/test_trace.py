"""A trace's events: births, deaths, and the cache emptied between them."""

from __future__ import annotations

from array import array

from autotrain_mem.estimator.replay import estimate_memory
from autotrain_mem.spec import Block, Owner, Phase, Trace
from autotrain_mem.spec.trace import CACHE_EMPTIED
from autotrain_mem.units import KIB


def trace(events: list[int]) -> Trace:
    """Three blocks of 1, 2 and 4 KiB; the optimizer step begins at the fourth event."""
    owners = (Owner.WEIGHTS, Owner.ACTIVATIONS, Owner.OPTIMIZER_STATE)
    return Trace(
        blocks=tuple(
            Block(size_bytes=KIB << index, owner=owner, module=owner.value) for index, owner in enumerate(owners)
        ),
        events=array("q", events),
        phase_starts=((0, Phase.FORWARD), (3, Phase.OPTIMIZER_STEP)),
        operators=3,
        seconds=0.0,
    )


EMPTIED = trace([1, CACHE_EMPTIED, 2, CACHE_EMPTIED, -2, CACHE_EMPTIED, 3])


def test_walking_yields_births_and_deaths_only() -> None:
    assert [(sign, block.size_bytes // KIB) for _, sign, block in EMPTIED.walk()] == [(1, 1), (1, 2), (-1, 2), (1, 4)]


def test_an_emptied_cache_moves_no_phase() -> None:
    forward, step = Phase.FORWARD, Phase.OPTIMIZER_STEP
    assert [phase for phase, _, _ in EMPTIED.walk()] == [forward, forward, step, step]


def test_an_emptied_cache_survives_the_wire() -> None:
    assert Trace.from_json(EMPTIED.to_json()) == EMPTIED


def test_an_emptied_cache_changes_neither_what_is_allocated_at_the_peak_nor_whose_it_is() -> None:
    found = estimate_memory(EMPTIED)
    assert found.peak_allocated_bytes == 5 * KIB
    assert found.peak_phase is Phase.OPTIMIZER_STEP
    assert {owner for owner, size in found.owners_at_peak.items() if size} == {Owner.WEIGHTS, Owner.OPTIMIZER_STATE}
