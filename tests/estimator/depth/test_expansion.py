"""Runs of few layers, expanded: what they tell is the whole run, or nothing."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layered import PLAIN, Model, run
from story import story

from autotrain_mem.estimator.depth.extrapolate import expand, expand_loss
from autotrain_mem.spec import Phase, Trace
from autotrain_mem.spec.model import LAYERS_HELD_BACK, Depths, LayerPattern
from autotrain_mem.spec.trace import CACHE_EMPTIED
from autotrain_mem.spec.work import Kind, Work, Workload

DEPTHS = Depths(short=1, long=3, whole=12)

SIZES = st.sampled_from([4, 8, 16])
"""Few, so that blocks of different origin are alike."""


@st.composite
def models(draw: st.DrawFn) -> Model:
    def some(least: int = 0) -> tuple[int, ...]:
        return tuple(draw(st.lists(SIZES, min_size=least, max_size=3)))

    return Model(
        weights=some(1),
        temporary=some(),
        kept=some(),
        handed_on=draw(st.none() | SIZES),
        in_backward=some(),
        trained=draw(st.booleans()),
        lists=some(),
        empties=draw(st.booleans()),
    )


def expanded(model: Model, depths: Depths = DEPTHS, **how: int) -> Trace | None:
    return expand(run(model, depths.short, **how), run(model, depths.long, **how), depths)


def told(trace: Trace | None) -> Trace:
    assert trace is not None
    return trace


@given(model=models(), depths=st.sampled_from([DEPTHS, Depths(short=2, long=4, whole=9), replace(DEPTHS, whole=3)]))
@settings(max_examples=60, deadline=None)
def test_few_layers_tell_every_event_of_the_whole_run(model: Model, depths: Depths) -> None:
    assert story(told(expanded(model, depths))) == story(run(model, depths.whole))


@pytest.mark.parametrize(
    ("model", "depths", "how"),
    [
        (replace(PLAIN, other_layers=(72,)), Depths(short=2, long=6, whole=10, period=2), {}),  # layers of two kinds
        (PLAIN, Depths(short=LAYERS_HELD_BACK + 1, long=LAYERS_HELD_BACK + 3, whole=12), {"stream": 1}),
    ],
)
def test_layers_of_two_kinds_and_uses_on_other_streams_are_told(
    model: Model, depths: Depths, how: dict[str, int]
) -> None:
    whole = told(expanded(model, depths, **how))
    assert bool(whole.stream_uses) is bool(how)
    assert story(whole) == story(run(model, depths.whole, **how))


HELD_BACK = Depths(short=LAYERS_HELD_BACK, long=LAYERS_HELD_BACK + 2, whole=12)


@pytest.mark.parametrize(
    ("model", "depths", "how"),
    [
        (replace(PLAIN, other_layers=(72,)), DEPTHS, {}),  # layers of two kinds, one by one
        (PLAIN, Depths(short=1, long=2, whole=12), {}),  # one layer more is not enough
        (PLAIN, HELD_BACK, {"stream": 1}),  # what waits on another stream may wait for more layers
    ],
)
def test_too_few_layers_tell_nothing(model: Model, depths: Depths, how: dict[str, int]) -> None:
    assert expanded(model, depths, **how) is None


def with_one_empty_cache_instead_of(death: int, trace: Trace) -> Trace:
    trace.events[trace.events.index(death)] = CACHE_EMPTIED
    return trace


@pytest.mark.parametrize(
    "long",
    [
        with_one_empty_cache_instead_of(-20, run(PLAIN, 3)),  # something else, once
        replace(run(PLAIN, 3), not_counted=("the workspace of cuBLAS",)),
    ],
)
def test_runs_that_do_or_leave_out_different_things_are_not_told(long: Trace) -> None:
    assert expand(run(PLAIN, 1), long, DEPTHS) is None


def test_a_block_that_was_born_again_is_born_again_in_every_layer() -> None:
    """As in a generation, whose skipped steps are repetitions of one that is rehearsed."""

    def generated(layers: int) -> Trace:
        trace = run(PLAIN, layers, steps=1)
        forward = next(at for at, phase in trace.phase_starts if phase is Phase.FORWARD)
        born = next(index for index in range(forward, len(trace.events)) if trace.events[index] < 0)
        block = -trace.events[born]
        trace.events.extend([block, -block] * layers)
        return trace

    whole = told(expand(generated(1), generated(3), DEPTHS))
    assert story(whole) == story(generated(12))
    assert len(whole.blocks) == len(generated(12).blocks)


def test_operators_and_work_grow_by_the_layer_and_seconds_are_those_of_both() -> None:
    def worked(layers: int) -> Trace:
        numbers = {"flops": 5, "bytes": 3, "fixed_bytes": 2, "launches": 1}
        work = Work(phase=Phase.FORWARD, kind=Kind.MATMUL, dtype="bfloat16", count=2.0 + 4 * layers, **numbers)
        return replace(run(PLAIN, layers), work=Workload(work=(work,), micro_steps=2))

    whole = told(expand(worked(1), worked(3), DEPTHS))
    assert whole.operators == 10 + 7 * 12
    assert whole.seconds == 1.0
    assert [work.count for work in whole.work.work] == [2.0 + 4 * 12]


@pytest.mark.parametrize(
    ("pattern", "held_back", "depths"),
    [
        (LayerPattern(layers=24, period=1), 0, (1, 3)),
        (LayerPattern(layers=26, period=2), 0, (2, 6)),
        (LayerPattern(layers=27, period=2), 0, (3, 7)),
        (LayerPattern(layers=24, period=1), 5, (6, 8)),
    ],
)
def test_the_fewest_layers_are_rehearsed_that_end_in_a_whole_period(
    pattern: LayerPattern, held_back: int, depths: tuple[int, int]
) -> None:
    chosen = pattern.depths(held_back=held_back)
    assert chosen is not None
    assert (chosen.short, chosen.long, chosen.whole) == (*depths, pattern.layers)
    assert replace(pattern, layers=6).depths() is None  # few layers are rehearsed whole


def test_a_loss_of_few_chunks_is_told_as_layers_are_and_losses_of_different_numbers_are_not() -> None:
    few, more = (replace(run(PLAIN, chunks), loss_chunks=(12,)) for chunks in (3, 5))
    whole = told(expand_loss(few, more, short=3, long=5))
    assert story(whole) == story(run(PLAIN, 12))
    assert whole.loss_chunks == ()
    one, other = (replace(each, loss_chunks=(12, 16)) for each in (few, more))
    assert expand_loss(one, other, short=3, long=5) is None
    layers = (replace(run(PLAIN, layers), loss_chunks=(64,)) for layers in (1, 3))
    assert told(expand(*layers, DEPTHS)).loss_chunks == (64,), "without all chunks it still says so"
