"""A recorded run: every device allocation and free, in order."""

from __future__ import annotations

import base64
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from autotrain_mem.spec.phase import Phase
from autotrain_mem.spec.work import Workload

CACHE_EMPTIED = 0
"""The event of a ``torch.cuda.empty_cache()``: what is reserved and not allocated goes back to the device."""


class Owner(StrEnum):
    """To whom the bytes of a block belong.

    >>> from autotrain_mem import Owner
    >>> Owner.OPTIMIZER_STATE.value
    'optimizer_state'
    """

    WEIGHTS = "weights"
    """Parameters and buffers of the model, adapters included."""
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    KV_CACHE = "kv_cache"
    """Keys and values of the tokens so far, while completions are generated."""
    ACTIVATIONS = "activations"
    """Made by a forward pass (or its recomputation) and kept beyond it, for the backward pass."""
    TEMPORARY = "temporary"
    """Made and freed within one stretch of forward, backward or optimizer step."""
    OTHER = "other"
    """Whatever is none of these: the batch itself, metrics, running loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One allocation: ``size_bytes`` as requested, before any rounding."""

    size_bytes: int
    owner: Owner
    module: str
    """Qualified name of the parameter it is, or of the module whose forward made it; empty when neither."""
    stream: int = 0
    """Where it is allocated: 0 is the default stream. The allocator hands a block out again on its own stream only."""


class StreamUse(NamedTuple):
    """A block is used on a stream that is not its own (``torch.Tensor.record_stream``).

    When it dies, it may not be handed out again before that stream has done what was asked of it by then.
    """

    event: int
    """Comes before the event of this index; after all of them where there is none."""
    block: int
    """``n`` for ``blocks[n - 1]``, as among the events."""
    stream: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Every allocation and free of one run, in order.

    ``events`` holds ``+n`` for the birth and ``-n`` for the death of block ``blocks[n - 1]``, and ``CACHE_EMPTIED``
    between them. A storage that is resized dies and is born again as a new block. A block may be born again once it
    is dead: steps of a generation that are not rehearsed are written as repetitions of one that is. ``phase_starts``
    lists (index of the first event, phase).
    """

    blocks: tuple[Block, ...]
    events: array[int]
    phase_starts: tuple[tuple[int, Phase], ...]
    operators: int
    """How many operators were dispatched."""
    seconds: float
    """Wall time of the recorded run."""
    stream_uses: tuple[StreamUse, ...] = ()
    """In the order in which they happened."""
    not_counted: tuple[str, ...] = ()
    """What is known to be missing, each in a sentence."""
    work: Workload = field(default_factory=Workload)
    """What it computed and moved, for the time that it takes."""

    loss_chunks: tuple[int, ...] = ()
    """How many chunks a loss would have had that was rehearsed with fewer: every number that occurred."""

    def walk(self) -> Iterator[tuple[Phase, int, Block]]:
        """Yield (phase, +1 for a birth or -1 for a death, block) for every birth and death."""
        starts = iter((*self.phase_starts, (len(self.events) + 1, Phase.SAVE)))
        phase = Phase.LOAD
        following, following_phase = next(starts)
        for index, event in enumerate(self.events):
            while index >= following:
                phase = following_phase
                following, following_phase = next(starts)
            if event != CACHE_EMPTIED:
                yield phase, (1 if event > 0 else -1), self.blocks[abs(event) - 1]

    def to_json(self) -> dict[str, Any]:
        """Compact wire form: columns, compressed. A trace of 100,000 events takes a few hundred kB."""
        names = sorted({block.module for block in self.blocks})
        number = {name: index for index, name in enumerate(names)}
        owners = list(Owner)
        return {
            "sizes": _pack("q", (block.size_bytes for block in self.blocks)),
            "owners": _pack("b", (owners.index(block.owner) for block in self.blocks)),
            "modules": _pack("i", (number[block.module] for block in self.blocks)),
            "module_names": names,
            "streams": _pack("b", (block.stream for block in self.blocks)),
            "events": _pack("q", self.events),
            "stream_uses": [list(use) for use in self.stream_uses],
            "phase_starts": [[index, phase.value] for index, phase in self.phase_starts],
            "operators": self.operators,
            "seconds": self.seconds,
            "not_counted": list(self.not_counted),
            "work": self.work.to_json(),
            "loss_chunks": list(self.loss_chunks),
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Trace:
        """Read what :meth:`to_json` wrote."""
        owners, names = list(Owner), fields["module_names"]
        columns = zip(
            _unpack("q", fields["sizes"]),
            _unpack("b", fields["owners"]),
            _unpack("i", fields["modules"]),
            _unpack("b", fields["streams"]),
            strict=True,
        )
        return cls(
            blocks=tuple(
                Block(size_bytes=size, owner=owners[o], module=names[m], stream=s) for size, o, m, s in columns
            ),
            events=_unpack("q", fields["events"]),
            stream_uses=tuple(StreamUse(*use) for use in fields["stream_uses"]),
            phase_starts=tuple((index, Phase(phase)) for index, phase in fields["phase_starts"]),
            operators=fields["operators"],
            seconds=fields["seconds"],
            not_counted=tuple(fields["not_counted"]),
            work=Workload.from_json(fields["work"]),
            loss_chunks=tuple(fields["loss_chunks"]),
        )


def _pack(code: str, numbers: Iterable[int]) -> str:
    return base64.b64encode(zlib.compress(array(code, numbers).tobytes(), 1)).decode("ascii")


def _unpack(code: str, text: str) -> array[int]:
    column: array[int] = array(code)
    column.frombytes(zlib.decompress(base64.b64decode(text)))
    return column
