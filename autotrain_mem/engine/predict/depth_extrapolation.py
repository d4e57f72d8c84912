"""Rehearses copies of a model with few layers and of a loss with few chunks, and extrapolates the whole from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from autotrain_mem.estimator.depth.extrapolate import expand, expand_loss
from autotrain_mem.spec import Knobs, Trace
from autotrain_mem.spec.model import FEW_LOSS_CHUNKS, FEWEST_LOSS_CHUNKS, MORE_LOSS_CHUNKS, Depths
from autotrain_mem.worker.client import Worker
from autotrain_mem.worker.pool import Workers

CHUNKED_TOKENS = FEWEST_LOSS_CHUNKS * 256
"""Tokens of a micro-batch from which TRL's SFT loss has chunks enough: of 256 each
(``trl/trainer/sft_trainer.py: _CHUNKED_LM_HEAD_CHUNK_SIZE``)."""

Rehearse = Callable[[Knobs, int, int | None, Worker], Trace]
"""Of knobs, with so many layers, and so many chunks of the loss or all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Settings that are predicted from copies."""

    knobs: Knobs
    depths: Depths
    tokens: int
    """Of a micro-batch."""


class Copies:
    """Rehearses several copies at once, one for each worker.

    Args:
        rehearse: One copy, by one worker.
        has_chunks: Whether the method's loss goes over the tokens in chunks.
    """

    def __init__(self, workers: Workers, rehearse: Rehearse, *, has_chunks: bool) -> None:
        self._workers = workers
        self._rehearse = rehearse
        self._has_chunks = has_chunks

    def traces(self, points: Sequence[Point]) -> list[Trace | None]:
        """Traces of the whole model; None where its copies do not tell for sure. The longest copies are begun first."""
        copies = [
            (point, layers, chunks)
            for point in points
            for layers in (point.depths.long, point.depths.short)
            for chunks in self._chunks(point)
        ]
        calls = [partial(self._rehearse, point.knobs, layers, chunks) for point, layers, chunks in copies]
        results = iter(self._workers.map(calls))
        traces = [
            [[next(results) for _ in self._chunks(point)] for _ in (point.depths.long, point.depths.short)]
            for point in points
        ]
        return [self._whole(point, *both) for point, both in zip(points, traces, strict=True)]

    def _whole(self, point: Point, long: list[Trace], short: list[Trace]) -> Trace | None:
        of_long, of_short = self._with_all_chunks(long), self._with_all_chunks(short)
        if of_long is None or of_short is None:
            return None
        return expand(of_short, of_long, point.depths)

    def _with_all_chunks(self, copies: list[Trace]) -> Trace | None:
        if len(copies) == 1:
            return copies[0]
        more, few = copies
        if not few.loss_chunks:
            self._has_chunks = False  # another loss, such as Liger's: no second copy is made from here on
        return expand_loss(few, more, short=FEW_LOSS_CHUNKS, long=MORE_LOSS_CHUNKS)

    def _chunks(self, point: Point) -> tuple[int | None, ...]:
        """More of them first."""
        return (MORE_LOSS_CHUNKS, FEW_LOSS_CHUNKS) if self._has_chunks and point.tokens >= CHUNKED_TOKENS else (None,)
