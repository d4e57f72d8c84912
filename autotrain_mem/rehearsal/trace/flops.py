"""Counts what a recorded run computes and moves: FLOPs, bytes and kernels of every operator, while it is recorded.

FLOPs are those of torch's own formulas (``torch/utils/flop_counter.py: flop_registry``), and of a few here for
operators that it does not know. Bytes are what an operator reads and writes; views cost nothing, and neither does
memory that is only taken. What stands in for a kernel and runs no operator that would tell (fused attention, Liger's
head, copies to the host) says it by :func:`recorder.note`.

An operator is looked at once for each of its shapes; after that it costs a look-up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch

from autotrain_mem.rehearsal.trace.operator_costs import Cost, cost_of, is_free
from autotrain_mem.types import Phase, Work, Workload

COUNTED = frozenset({Phase.GENERATE, Phase.SCORE, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP})
"""What every training step consists of; loading, evaluating and saving come once in a while."""

_BEGINS_A_STEP = frozenset({Phase.GENERATE, Phase.SCORE, Phase.FORWARD})

Key = tuple[Any, ...]
Mark = dict[Key, float]
"""How often each operator of a phase had run."""


@dataclass(slots=True)
class _Period:
    """The work from the end of one optimizer step to the end of the next."""

    counts: defaultdict[Phase, dict[Key, float]] = field(default_factory=lambda: defaultdict(dict))
    of_chunks: defaultdict[Phase, dict[Key, float]] = field(default_factory=lambda: defaultdict(dict))
    """How many of them were for chunks of the loss."""
    micro_steps: int = 0
    optimizer_steps: int = 0


class WorkCounter:
    """The work of one run, as it goes. A workload is that of its last whole optimizer step.

    The first step of an optimizer makes its state, and later ones do not: so the last one is the one that counts.
    """

    def __init__(self) -> None:
        self._costs: dict[Key, Cost] = {}
        self._free: dict[Any, bool] = {}
        self._weights: set[tuple[int, ...]] = set()
        self._is_of_weights = False
        self._period = self._whole = _Period()
        self._counts: dict[Key, float] | None = None
        self._of_chunks: dict[Key, float] = {}

    # -- what the recorder tells -----------------------------------------------------------------------------------

    def enter_phase(self, phase: Phase) -> None:
        if self._period.optimizer_steps and phase in _BEGINS_A_STEP:
            self._whole, self._period = self._period, _Period()
        self._period.micro_steps += phase is Phase.BACKWARD
        self._counts = self._period.counts[phase] if phase in COUNTED else None
        self._of_chunks = self._period.of_chunks[phase]

    def optimizer_stepped(self) -> None:
        self._period.optimizer_steps += 1

    def know_weight(self, weight: torch.Tensor) -> None:
        """Learns the shape of a weight: what has it, does not grow with the tokens.

        Its gradient has it too, as have a copy in another dtype and, transposed, what a backward pass reads. A weight
        of 4 bits is known by the shape that it has when it is dequantized as well.
        """
        state = getattr(weight, "quant_state", None)
        for shape in (tuple(weight.shape), tuple(getattr(state, "shape", None) or ())):
            self._weights |= {shape, (*shape[:-2], *shape[:-3:-1])} if len(shape) > 1 else set()

    def of_weights(self) -> AbstractContextManager[Any]:
        """Within the block, nothing grows with the tokens, whatever its shape: shards are gathered, or gradients
        reduced."""
        return patch.object(self, "_is_of_weights", True)

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        counts = self._counts
        if counts is None:
            return
        free = self._free.get(operator)
        if free is None:
            free = self._free[operator] = is_free(operator)
        if free:
            return
        key = (
            operator,
            self._is_of_weights,
            *_shapes(args),
            *_shapes((out,)),
            *(_shapes(kwargs.values()) if kwargs else ()),
        )
        known = counts.get(key)
        if known is None:
            known = 0.0
            if key not in self._costs:
                cost = cost_of(operator, args, kwargs, out, self._weights)
                self._costs[key] = cost.fixed() if self._is_of_weights else cost
        counts[key] = known + 1.0

    def note(self, cost: Cost) -> None:
        """Records work that is no operator here."""
        if self._counts is not None:
            self._costs[cost,] = cost
            self._counts[cost,] = self._counts.get((cost,), 0.0) + 1.0

    def apart(self) -> WorkCounter:
        """Makes a counter for work that is tried outside the run, with what this one knows."""
        other = WorkCounter()
        other._costs, other._free, other._weights = self._costs, self._free, self._weights
        other._is_of_weights = self._is_of_weights
        return other

    def counts(self, phase: Phase) -> Mark:
        """Returns how often each operator of a phase has run since the last optimizer step."""
        return dict(self._period.counts[phase])

    def add(self, counts: Mark) -> None:
        """Counts operators that one made by :meth:`apart` has seen."""
        for key, count in counts.items() if self._counts is not None else ():
            assert self._counts is not None
            self._counts[key] = self._counts.get(key, 0.0) + count

    def mark_chunks(self, marks: Sequence[Mark]) -> None:
        """Marks, for each chunk of the loss, what the one in the middle does; of the marks the last is one of the end.

        Gradients of one chunk are added to those of the one before: one addition less than chunks, which is counted as
        that many and one below 0 beside them.
        """
        chunks = len(marks) - 1
        begun, ended = marks[(chunks - 1) // 2 :][:2]
        for key, count in ended.items():
            each = count - begun.get(key, 0.0)
            if each:
                self._of_chunks[key] = self._of_chunks.get(key, 0.0) + each * chunks

    # -- steps that are not run ------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """The counts of the current phase as they are now, for :meth:`repeat` and :meth:`mark_chunks`."""
        return dict(self._counts or {})

    def repeat(self, since: Mark, times: int, longest: int, mean_length: float) -> None:
        """Counts what has run since the mark ``times`` more, on fewer tokens.

        Args:
            longest: The length that the cache of keys and values had; what has it among its shape, is scaled.
            mean_length: That of the steps which are not run, on average.
        """
        counts = self._counts
        if counts is None:
            return
        for key, count in list(counts.items()):
            more = (count - since.get(key, 0.0)) * times
            if not more:
                continue
            cost, of_operator = self._costs[key], key[0]
            shapes: Iterable[Any] = (part for part in key if isinstance(part, torch.Size))
            shapes = (of_operator.shape,) if isinstance(of_operator, Cost) else shapes
            # One of its tensors is as long as the cache, or was before this token came.
            if any(size in (longest, longest - 1) for shape in shapes for size in shape):
                key = (*key, mean_length)
                self._costs[key] = cost.scaled(mean_length / longest)
            counts[key] = counts.get(key, 0.0) + more

    # -- what came of it -------------------------------------------------------------------------------------------

    def workload(self) -> Workload:
        """The last whole optimizer step, like operators taken together."""
        period = self._period if self._period.optimizer_steps else self._whole
        found: defaultdict[Work, float] = defaultdict(float)
        for phase, counts in period.counts.items():
            for key, count in counts.items():
                work, of_chunks = self._costs[key].work(phase), period.of_chunks[phase].get(key, 0.0)
                found[work] += count - of_chunks
                found[replace(work, of_chunk=True)] += of_chunks
        return Workload(
            work=tuple(replace(work, count=count) for work, count in found.items() if count),
            micro_steps=period.micro_steps,
            optimizer_steps=period.optimizer_steps,
        )


def _shapes(items: Any) -> Iterator[Any]:
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item.shape
            yield item.dtype
        elif isinstance(item, (list, tuple)) and item and isinstance(item[0], torch.Tensor):
            yield from _shapes(item)
