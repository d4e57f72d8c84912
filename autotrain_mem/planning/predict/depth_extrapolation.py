"""Rehearses two copies of a model with few layers, and extrapolates the whole from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from autotrain_mem.estimator.depth.extrapolate import expand
from autotrain_mem.types import Knobs, Trace
from autotrain_mem.types.model import FEW_LOSS_CHUNKS, MORE_LOSS_CHUNKS, Depths
from autotrain_mem.worker.client import Worker
from autotrain_mem.worker.pool import Workers

Rehearse = Callable[[Knobs, int | None, int | None, Worker], Trace]
"""Of knobs, with so many layers, and so many chunks of a loss that has many; None for all of either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Settings that are predicted from copies."""

    knobs: Knobs
    depths: Depths


def traces_of_copies(workers: Workers, rehearse: Rehearse, points: Sequence[Point]) -> Iterator[Trace | None]:
    """Extrapolates the whole model from a short copy and a long one, which also has more chunks of the loss.

    Where activations are offloaded no loss is cut: what waits on another stream is freed as its chunks pass. Copies are
    rehearsed one by each worker, those of a point one after the other, the longer first.

    Yields:
        A trace of each point, while those of the next are being rehearsed; None where its copies do not tell for sure.
    """
    copies = [
        partial(rehearse, point.knobs, layers, None if point.depths.sees_held_back else chunks)
        for point in points
        for layers, chunks in ((point.depths.long, MORE_LOSS_CHUNKS), (point.depths.short, FEW_LOSS_CHUNKS))
    ]
    traces = workers.each(copies)
    for point in points:
        long, short = next(traces), next(traces)
        yield expand(short, long, point.depths)
