"""Runs of a made-up model of any depth, of which is known what every layer does, and every chunk of its loss."""

from array import array
from dataclasses import dataclass, field

from autotrain_mem.types import Block, Owner, Phase, Trace
from autotrain_mem.types.trace import CACHE_EMPTIED, LossPass, StreamUse


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
