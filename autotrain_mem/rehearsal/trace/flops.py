"""Counts what a recorded run computes and moves: FLOPs, bytes and kernels of every operator.

FLOPs come from torch's own formulas (``torch/utils/flop_counter.py: flop_registry``), and from a few here for operators
that it does not have. Bytes are what an operator reads and writes; views and mere allocations cost nothing. Stand-ins
for kernels that run no such operator (fused attention, Liger's head, copies to the host) report their work to
:func:`recorder.note`.

An operator's cost is computed once for each of its shapes; after that it is looked up.
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
"""The phases of every training step; loading, evaluating and saving happen only now and then."""

_BEGINS_A_STEP = frozenset({Phase.GENERATE, Phase.SCORE, Phase.FORWARD})

Key = tuple[Any, ...]
Mark = dict[Key, float]
"""How often each operator of a phase had run."""


@dataclass(slots=True)
class _Period:
    """The work from the end of one optimizer step to the end of the next."""

    counts: defaultdict[Phase, dict[Key, float]] = field(default_factory=lambda: defaultdict(dict))
    of_chunks: defaultdict[Phase, dict[Key, float]] = field(default_factory=lambda: defaultdict(dict))
    """The part of ``counts`` that belongs to chunks of the loss."""
    micro_steps: int = 0
    optimizer_steps: int = 0


class WorkCounter:
    """Counts the work of one run as it goes. A workload is that of its last whole optimizer step.

    An optimizer's first step creates its state and later ones do not, so the last one counts.
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
        """Stores the shape of a weight: the bytes of a tensor with this shape do not grow with the tokens.

        The weight's gradient and its copy in another dtype have that shape too; a backward pass reads it transposed.
        For a 4-bit weight the dequantized shape is stored as well.
        """
        state = getattr(weight, "quant_state", None)
        for shape in (tuple(weight.shape), tuple(getattr(state, "shape", None) or ())):
            self._weights |= {shape, (*shape[:-2], *shape[:-3:-1])} if len(shape) > 1 else set()

    def of_weights(self) -> AbstractContextManager[Any]:
        """Within the block, no bytes grow with the tokens, whatever their shape: shards are gathered, or gradients
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
        """Records work that is not an operator here."""
        if self._counts is not None:
            self._costs[cost,] = cost
            self._counts[cost,] = self._counts.get((cost,), 0.0) + 1.0

    def apart(self) -> WorkCounter:
        """Returns a counter for a trial outside the run; it shares this one's costs and weight shapes."""
        other = WorkCounter()
        other._costs, other._free, other._weights = self._costs, self._free, self._weights
        other._is_of_weights = self._is_of_weights
        return other

    def counts(self, phase: Phase) -> Mark:
        """Returns how often each operator of a phase has run since the last optimizer step."""
        return dict(self._period.counts[phase])

    def add(self, counts: Mark) -> None:
        """Adds the counts of a counter that :meth:`apart` made."""
        for key, count in counts.items() if self._counts is not None else ():
            assert self._counts is not None
            self._counts[key] = self._counts.get(key, 0.0) + count

    def mark_chunks(self, marks: Sequence[Mark]) -> None:
        """Assigns to the loss's chunks the work of the middle one, times their number. The last mark is the pass's end.

        Each chunk's gradients are added to those of the chunk before, so there is one addition fewer than chunks. It
        counts as one for each chunk, and as -1 outside the chunks.
        """
        chunks = len(marks) - 1
        begun, ended = marks[(chunks - 1) // 2 :][:2]
        for key, count in ended.items():
            each = count - begun.get(key, 0.0)
            if each:
                self._of_chunks[key] = self._of_chunks.get(key, 0.0) + each * chunks

    # -- steps that are not run ------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """Returns the current phase's counts as they are now, for :meth:`repeat` and :meth:`mark_chunks`."""
        return dict(self._counts or {})

    def repeat(self, since: Mark, times: int, longest: int, mean_length: float) -> None:
        """Counts what has run since a mark another ``times`` times, on fewer tokens.

        Args:
            longest: Length of the KV cache in the step that ran; costs with this length in a shape are scaled.
            mean_length: Mean length of the KV cache in the steps that are not run.
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
