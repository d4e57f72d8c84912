"""Counts the FLOPs, bytes and kernels of a recorded run, phase by phase.

Some replacements of kernels run no torch operator (fused attention, Liger's head, copies to the host) and report their
work to :func:`recorder.note`. The cost of an operator is computed once for each of its shapes.
"""

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
"""The phases whose work is counted: those of a training step."""


Key = tuple[Any, ...]
Mark = dict[Key, float]
"""How often each operator of a phase had run at the time of the mark."""


@dataclass(slots=True)
class _Period:
    """The work between the ends of two optimizer steps."""

    counts: defaultdict[Phase, dict[Key, float]] = field(default_factory=lambda: defaultdict(dict))
    of_chunks: defaultdict[Phase, dict[Key, float]] = field(default_factory=lambda: defaultdict(dict))
    """The part of ``counts`` that belongs to the chunks of the loss."""
    micro_steps: int = 0
    optimizer_steps: int = 0


class WorkCounter:
    """Counts the work of one run. Its workload is the last whole optimizer step, since the first one creates state."""

    def __init__(self) -> None:
        self._costs: dict[Key, Cost] = {}
        self._weights: set[tuple[int, ...]] = set()
        self._is_of_weights = False
        self._period = self._whole = _Period()
        self._counts: dict[Key, float] | None = None
        self._of_chunks: dict[Key, float] = {}

    def enter_phase(self, phase: Phase) -> None:
        if self._period.optimizer_steps and phase in (Phase.GENERATE, Phase.SCORE, Phase.FORWARD):
            self._whole, self._period = self._period, _Period()
        self._period.micro_steps += phase is Phase.BACKWARD
        self._counts = self._period.counts[phase] if phase in COUNTED else None
        self._of_chunks = self._period.of_chunks[phase]

    def optimizer_stepped(self) -> None:
        self._period.optimizer_steps += 1

    def know_weight(self, weight: torch.Tensor) -> None:
        """Stores a weight's shape, also transposed and dequantized. Tensors of these shapes count as fixed bytes."""
        state = getattr(weight, "quant_state", None)
        for shape in (tuple(weight.shape), tuple(getattr(state, "shape", None) or ())):
            self._weights |= {shape, (*shape[:-2], *shape[:-3:-1])} if len(shape) > 1 else set()

    def of_weights(self) -> AbstractContextManager[Any]:
        """Within the block, which gathers shards or reduces gradients, no bytes grow with the tokens."""
        return patch.object(self, "_is_of_weights", True)

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if (counts := self._counts) is None or is_free(operator):
            return
        key = (
            operator,
            self._is_of_weights,
            *_shapes(args),
            *_shapes((out,)),
            *(_shapes(kwargs.values()) if kwargs else ()),
        )
        if key not in self._costs:
            cost = cost_of(operator, args, kwargs, out, self._weights)
            self._costs[key] = cost.fixed() if self._is_of_weights else cost
        counts[key] = counts.get(key, 0.0) + 1.0

    def note(self, cost: Cost) -> None:
        if self._counts is not None:
            self._costs[cost,] = cost
            self._counts[cost,] = self._counts.get((cost,), 0.0) + 1.0

    def fork(self) -> "WorkCounter":
        """Returns a counter for a trial outside the run, with this one's costs and weight shapes."""
        other = WorkCounter()
        other._costs, other._weights = self._costs, self._weights
        other._is_of_weights = self._is_of_weights
        return other

    def counts(self, phase: Phase) -> Mark:
        """Returns how often each operator of a phase has run since the last optimizer step."""
        return dict(self._period.counts[phase])

    def add(self, counts: Mark) -> None:
        if self._counts is not None:
            for key, count in counts.items():
                self._counts[key] = self._counts.get(key, 0.0) + count

    def mark_chunks(self, marks: Sequence[Mark]) -> None:
        """Assigns the work of the middle chunk, times the number of chunks, to the loss's chunks. Each chunk has a mark
        at its start; the last mark is the end.

        Adding the gradients of n chunks takes n - 1 additions, but n are assigned. So -1 remains outside the chunks.
        """
        chunks = len(marks) - 1
        begun, ended = marks[(chunks - 1) // 2 :][:2]
        for key, count in ended.items():
            if each := count - begun.get(key, 0.0):
                self._of_chunks[key] = self._of_chunks.get(key, 0.0) + each * chunks

    def mark(self) -> Mark:
        """Returns the counts of the current phase, for :meth:`repeat` and :meth:`mark_chunks`."""
        return dict(self._counts or {})

    def repeat(self, since: Mark, times: int, longest: int, mean_length: float) -> None:
        """Counts the work since a mark another ``times`` times, for steps that are not run. The KV cache had the length
        ``longest`` in the step that ran, and has ``mean_length`` in these; costs with it in a shape are scaled."""
        if (counts := self._counts) is None:
            return
        for key, count in list(counts.items()):
            if not (more := (count - since.get(key, 0.0)) * times):
                continue
            cost, of_operator = self._costs[key], key[0]
            shapes: Iterable[Any] = (part for part in key if isinstance(part, torch.Size))
            shapes = (of_operator.shape,) if isinstance(of_operator, Cost) else shapes
            # the operator has a tensor as long as the cache, with or without the new token
            if any(size in (longest, longest - 1) for shape in shapes for size in shape):
                key = (*key, mean_length)
                self._costs[key] = cost.scaled(mean_length / longest)
            counts[key] = counts.get(key, 0.0) + more

    def workload(self) -> Workload:
        """Returns the last whole optimizer step, with equal work merged."""
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
