"""Runs of few layers of a made-up model, expanded: what they tell is the whole run, or nothing."""

from array import array
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from story import story

from autotrain_mem.estimator.depth.extrapolate import expand
from autotrain_mem.types import CACHE_EMPTIED, Block, Kind, Owner, Phase, StreamUse, Trace, Work, Workload
from autotrain_mem.types.model import FEW_LOSS_CHUNKS, LAYERS_HELD_BACK, MORE_LOSS_CHUNKS, Depths, LayerPattern
from autotrain_mem.types.trace import LossPass


@dataclass(frozen=True, kw_only=True)
class Model:
    """What each layer does, in sizes of blocks."""

    weights: tuple[int, ...]
    temporary: tuple[int, ...] = ()
    """Born in a layer's forward, one inside the other, and dead before the next."""
    kept: tuple[int, ...] = ()
    """Born in a layer's forward, and dead in its backward."""
    handed_on: int | None = None
    """Born in a layer's forward, and dead in the next layer's."""
    in_backward: tuple[int, ...] = ()
    trained: bool = True
    """Whether each weight has a gradient, which the optimizer frees."""
    lists: tuple[int, ...] = ()
    """Made by the optimizer for every weight of every layer, and freed when the list is complete."""
    empties: bool = False
    other_layers: tuple[int, ...] = ()
    """Kept besides by every second layer."""
    in_chunk: tuple[int, ...] = (100,)
    """Born in a chunk's forward, and again in its backward, one inside the other, and dead before the next."""
    kept_of_chunk: tuple[int, ...] = (12,)
    """Born in a chunk's forward, and dead in its backward."""
    logged_of_chunk: int | None = None
    """Born for each chunk when the loss is done, and dead at once."""


PLAIN = Model(weights=(64, 8), temporary=(100,), kept=(32, 48), handed_on=16, in_backward=(100, 20), lists=(4, 4))


@dataclass
class _Record:
    blocks: list[Block] = field(default_factory=list)
    events: "array[int]" = field(default_factory=lambda: array("q"))
    phases: list[tuple[int, Phase]] = field(default_factory=list)
    uses: list[StreamUse] = field(default_factory=list)
    passes: list[LossPass] = field(default_factory=list)

    def bear(self, size: int, owner: Owner, module: str = "", stream: int = 0) -> int:
        self.blocks.append(Block(size_bytes=size, owner=owner, module=module, stream=stream))
        self.events.append(len(self.blocks))
        return len(self.blocks)

    def die(self, numbers: list[int]) -> None:
        self.events.extend(-number for number in numbers)

    def enter(self, phase: Phase) -> None:
        self.phases.append((len(self.events), phase))

    def passed(self, start: int, chunks: int) -> None:
        self.passes.append(LossPass(start, len(self.events), chunks, operators=2 + 3 * chunks))


def run(model: Model, layers: int, *, steps: int = 2, stream: int = 0, chunks: int = 0) -> Trace:
    """A run of so many optimizer steps; what is kept waits on another stream where one is given.

    Args:
        chunks: Of the loss; 0 where it has none.
    """
    record = _Record()
    record.enter(Phase.LOAD)
    record.die([record.bear(layers * sum(model.weights) + 1000, Owner.TEMPORARY, "warm up")])
    record.bear(1000, Owner.WEIGHTS, "embedding")
    for layer in range(layers):
        for number, size in enumerate(model.weights):
            record.bear(size, Owner.WEIGHTS, f"layers.{layer}.{number}.weight")
    for _ in range(steps):
        _step(record, model, layers, stream, chunks)
    return Trace(
        blocks=tuple(record.blocks),
        events=record.events,
        phase_starts=tuple(record.phases),
        stream_uses=tuple(record.uses),
        operators=10 + 7 * layers + sum(one.operators for one in record.passes),
        seconds=0.5,
        loss_passes=tuple(record.passes),
    )


def _step(record: _Record, model: Model, layers: int, stream: int, chunks: int) -> None:
    record.enter(Phase.FORWARD)
    batch = record.bear(24, Owner.OTHER, "batch")
    kept, before = [], batch
    for layer in range(layers):
        name = f"layers.{layer}"
        temporary = [record.bear(size, Owner.TEMPORARY, name) for size in model.temporary]
        sizes = model.kept + model.other_layers * (layer % 2)
        kept.append([record.bear(size, Owner.ACTIVATIONS, name, stream) for size in sizes])
        if stream:
            record.uses += [StreamUse(len(record.events), number, 0) for number in kept[-1]]
        record.die(temporary[::-1])
        if model.handed_on is not None:
            after = record.bear(model.handed_on, Owner.ACTIVATIONS, name)
            record.die([before])
            before = after
    loss = record.bear(4, Owner.ACTIVATIONS, "head")
    of_chunks = _chunks_forward(record, model, chunks)
    record.enter(Phase.BACKWARD)
    _chunks_backward(record, model, of_chunks)
    record.die([loss, before] if model.handed_on is not None else [loss])
    gradients = []
    for layer in reversed(range(layers)):
        inside = [record.bear(size, Owner.TEMPORARY) for size in model.in_backward]
        record.die(kept[layer])
        if model.trained:
            gradients += [
                record.bear(size, Owner.GRADIENTS, f"layers.{layer}.{number}.weight")
                for number, size in enumerate(model.weights)
            ]
        record.die(inside)
        if model.empties:
            record.events.append(CACHE_EMPTIED)
    record.enter(Phase.OPTIMIZER_STEP)
    _optimize(record, model, layers, gradients[::-1])


def _chunks_forward(record: _Record, model: Model, chunks: int) -> list[list[int]]:
    """Adds each chunk's loss to that of those before, and returns what is kept of each."""
    if not chunks:
        return []
    start, total, kept = len(record.events), record.bear(4, Owner.TEMPORARY), []
    for _ in range(chunks):
        inside = [record.bear(size, Owner.TEMPORARY) for size in model.in_chunk]
        kept.append([record.bear(size, Owner.ACTIVATIONS) for size in model.kept_of_chunk])
        record.die(inside[::-1])
        before, total = total, record.bear(4, Owner.TEMPORARY)
        record.die([before])
    record.passed(start, chunks)
    record.die([total])
    if model.logged_of_chunk is not None:
        for _ in range(chunks):
            record.die([record.bear(model.logged_of_chunk, Owner.TEMPORARY)])
    return kept


def _chunks_backward(record: _Record, model: Model, kept: list[list[int]]) -> None:
    """Adds each chunk's gradient of the head to those of the ones behind it."""
    if not kept:
        return
    start, gradient = len(record.events), 0
    for of_chunk in reversed(kept):
        inside = [record.bear(size, Owner.TEMPORARY) for size in model.in_chunk]
        before, gradient = gradient, record.bear(64, Owner.TEMPORARY)
        record.die(inside + of_chunk)
        if before:
            record.die([before])
    record.passed(start, len(kept))
    record.die([gradient])


def _optimize(record: _Record, model: Model, layers: int, gradients: list[int]) -> None:
    for size in model.lists:
        made = [record.bear(size, Owner.TEMPORARY) for _ in range(layers * len(model.weights))]
        stacked = record.bear(1000 + size * len(made), Owner.TEMPORARY)  # with that of the embedding
        record.die(made)
        record.die([stacked])
    record.die(gradients)


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
        in_chunk=some(1),
        kept_of_chunk=some(),
    )


def expanded(model: Model, depths: Depths = DEPTHS, **how: int) -> Trace | None:
    return expand(run(model, depths.short, **how), run(model, depths.long, **how), depths)


CHUNKS = 20


def cut(model: Model, layers: int, chunks: int) -> Trace:
    """A run with so many chunks of a loss that has more."""
    return replace(run(model, layers, chunks=chunks), loss_chunks=(CHUNKS,))


@given(
    model=models(),
    depths=st.sampled_from([DEPTHS, Depths(short=2, long=4, whole=9), replace(DEPTHS, whole=3)]),
    chunks=st.sampled_from([0, 5, CHUNKS]),
)
@settings(max_examples=100, deadline=None)
def test_few_layers_tell_every_event_of_the_whole_run(model: Model, depths: Depths, chunks: int) -> None:
    """With a loss of no chunks, of as many in every run, and of more in the whole run than in those of few layers."""
    few = expanded(model, depths, chunks=chunks)
    if chunks == CHUNKS:
        few = expand(cut(model, depths.short, FEW_LOSS_CHUNKS), cut(model, depths.long, MORE_LOSS_CHUNKS), depths)
    whole = run(model, depths.whole, chunks=chunks)
    assert few is not None
    assert story(few) == story(whole)
    assert few.operators == whole.operators


TWO_KINDS = replace(PLAIN, other_layers=(72,))
HELD_BACK = Depths(short=LAYERS_HELD_BACK, long=LAYERS_HELD_BACK + 2, whole=12)


def test_layers_of_two_kinds_and_uses_on_other_streams_are_told_if_there_are_enough() -> None:
    for model, depths, how, is_told in (
        (TWO_KINDS, Depths(short=2, long=6, whole=10, period=2), {}, True),
        (TWO_KINDS, DEPTHS, {}, False),  # one by one
        (PLAIN, Depths(short=1, long=2, whole=12), {}, False),  # one layer more is not enough
        # What waits on another stream may wait for more layers.
        (PLAIN, replace(HELD_BACK, short=LAYERS_HELD_BACK + 1, long=LAYERS_HELD_BACK + 3), {"stream": 1}, True),
        (PLAIN, HELD_BACK, {"stream": 1}, False),
    ):
        whole = expanded(model, depths, **how)
        assert (whole is not None) is is_told, depths
        if whole is not None:
            assert bool(whole.stream_uses) is bool(how)
            assert story(whole) == story(run(model, depths.whole, **how))


def with_one_empty_cache_instead_of(death: int, trace: Trace) -> Trace:
    trace.events[trace.events.index(death)] = CACHE_EMPTIED
    return trace


LOGGED = replace(PLAIN, logged_of_chunk=52)
FEW, MORE = cut(PLAIN, 1, FEW_LOSS_CHUNKS), cut(PLAIN, 3, MORE_LOSS_CHUNKS)


def test_runs_that_do_or_leave_out_different_things_are_not_told() -> None:
    assert expand(FEW, MORE, DEPTHS) is not None
    for short, long in (
        (run(PLAIN, 1), with_one_empty_cache_instead_of(-20, run(PLAIN, 3))),  # something else, once
        (run(PLAIN, 1), replace(run(PLAIN, 3), not_counted=("the workspace of cuBLAS",))),
        # Losses of which the chunks are unclear.
        (replace(FEW, loss_chunks=(12,)), replace(MORE, loss_chunks=(16,))),
        (replace(FEW, loss_chunks=(12, 20)), replace(MORE, loss_chunks=(12, 20))),
        (FEW, run(PLAIN, 3, chunks=MORE_LOSS_CHUNKS)),  # cut in one of them
        (FEW, cut(PLAIN, 3, FEW_LOSS_CHUNKS)),
        (FEW, cut(PLAIN, 3, FEW_LOSS_CHUNKS + 1)),  # one chunk more is not enough
        (replace(FEW, loss_passes=()), replace(MORE, loss_passes=())),  # unmarked
        # What is done outside the loss for each of its chunks is not taken for that of layers.
        (cut(LOGGED, 1, FEW_LOSS_CHUNKS), cut(LOGGED, 3, MORE_LOSS_CHUNKS)),
    ):
        assert expand(short, long, DEPTHS) is None


def test_the_fewest_layers_are_rehearsed_that_end_in_a_whole_period() -> None:
    for pattern, held_back, depths in (
        (LayerPattern(layers=24, period=1), 0, (1, 3)),
        (LayerPattern(layers=26, period=2), 0, (2, 6)),
        (LayerPattern(layers=27, period=2), 0, (3, 7)),
        (LayerPattern(layers=24, period=1), 5, (6, 8)),
        (LayerPattern(layers=48, period=1, least=2), 0, (2, 4)),
        (LayerPattern(layers=24, period=2, least=2), 0, (2, 6)),
    ):
        chosen = pattern.depths(held_back=held_back)
        assert chosen is not None
        assert (chosen.short, chosen.long, chosen.whole) == (*depths, pattern.layers)
        assert replace(pattern, layers=6).depths() is None  # few layers are rehearsed whole


def test_a_copy_with_a_tower_that_images_go_through_is_hardly_faster_than_the_whole() -> None:
    pattern = LayerPattern(layers=36, period=1, tower=32)
    assert pattern.depths() == LayerPattern(layers=36, period=1).depths()
    assert pattern.depths(has_images=True) is None
    assert replace(pattern, layers=80).depths(has_images=True) is not None


def test_work_of_chunks_grows_with_their_number_unless_it_differs_with_the_layers() -> None:
    def worked(layers: int, chunks: int, flops: int) -> Trace:
        numbers = {"phase": Phase.FORWARD, "kind": Kind.MATMUL, "dtype": "bfloat16", "bytes": 3, "fixed_bytes": 2}
        layer, chunk = (Work(flops=each, launches=1, count=2.0, **numbers) for each in (5, flops))
        work = (replace(layer, count=1.0 + 2 * layers), replace(chunk, count=2.0 * chunks, of_chunk=True))
        return replace(cut(PLAIN, layers, chunks), work=Workload(work=work, micro_steps=2))

    few = worked(1, FEW_LOSS_CHUNKS, 7)
    whole = expand(few, worked(3, MORE_LOSS_CHUNKS, 7), DEPTHS)
    assert whole is not None
    assert [work.count for work in whole.work.work] == [1.0 + 2 * DEPTHS.whole, 2.0 * CHUNKS]
    assert expand(few, worked(3, MORE_LOSS_CHUNKS, 8), DEPTHS) is None
