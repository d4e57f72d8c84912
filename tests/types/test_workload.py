"""Work and step time as values: over the wire, and from copies of few layers to the whole depth."""

from dataclasses import replace

import pytest

from autotrain_mem.types import Phase, Work, Workload
from autotrain_mem.types.work import Kind


def work(count: float = 1.0, flops: int = 100, phase: Phase = Phase.FORWARD) -> Work:
    numbers = {"flops": flops, "bytes": 10, "fixed_bytes": 20, "launches": 1}
    return Work(phase=phase, kind=Kind.MATMUL, dtype="bfloat16", count=count, **numbers)


def layers(count: int) -> Workload:
    """Each layer has three products; the update passes all of them at once."""
    update = work(1.0, flops=7 * count, phase=Phase.OPTIMIZER_STEP)
    return Workload(work=(work(5.0, flops=1), work(3.0 * count), update), micro_steps=2, optimizer_steps=1)


def total_flops(workload: Workload) -> float:
    return sum(each.flops * each.count for each in workload.work)


def test_few_layers_tell_the_work_of_many() -> None:
    whole = layers(2).extrapolated(layers(4), 15.0)
    assert total_flops(whole) == total_flops(layers(32))
    assert {each.flops: each.count for each in whole.work} == {1: 5.0, 100: 96.0, 14: -14.0, 28: 15.0}
    assert (whole.micro_steps, whole.optimizer_steps) == (2, 1)
    assert layers(2).extrapolated(layers(2), 15.0) == layers(2), "what both depths do alike is not multiplied"


def chunks(count: int, rows: int = 8) -> Workload:
    """Layers that grow with the rows, and a loss that reads its head once for each chunk."""
    layer, chunk = work(4.0, flops=100 * rows), replace(work(2.0 * count, flops=7), of_chunk=True)
    return Workload(work=(layer, chunk), micro_steps=2, optimizer_steps=1)


def test_few_chunks_tell_the_work_of_all() -> None:
    whole = chunks(3).with_chunks(3, 64)
    assert whole == chunks(64)
    assert {(each.flops, each.count) for each in whole.of_chunks} == {(7, 128.0)}


@pytest.mark.parametrize("ratio", [0.125, 0.5, 2.0])
def test_more_rows_are_more_chunks_and_larger_layers(ratio: float) -> None:
    rows = int(8 * ratio)
    whole, other = chunks(64), chunks(8 * rows, rows)
    assert total_flops(whole.of_rows(ratio)) == total_flops(other)
    (chunk,) = [each for each in whole.of_rows(ratio).work if each.of_chunk]
    assert (chunk.fixed_bytes, chunk.launches) == (20, 1)
    update = Workload(work=(work(1.0, phase=Phase.OPTIMIZER_STEP),))
    assert update.of_rows(ratio) == update


def test_without_a_mask_attention_computes_half_and_nothing_else_changes() -> None:
    attention = replace(work(), kind=Kind.ATTENTION)
    found = Workload(work=(attention, work())).without_mask().work
    assert [each.flops for each in found] == [50, 100]
