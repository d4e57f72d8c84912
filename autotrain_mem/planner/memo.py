"""Every rehearsal is made once and remembered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autotrain_mem.spec import Attempt, Estimate, Knobs, Phase

Predict = Callable[[Knobs], Estimate]
"""Rehearses one point: 1 to 20 seconds."""
Told = Callable[[Attempt], None]


class Memo:
    """A ``Predict`` that answers a repeated question from memory and keeps what was asked, in order.

    Args:
        may_expand: Whether ``expandable_segments`` may be turned on. It costs nothing and needs no other rehearsal, so
            it is no question of its own: it is on where it makes the difference, or where nothing else would.
        told: Hears of every rehearsal as it is judged.
    """

    def __init__(self, predict: Predict, *, may_expand: bool = False, told: Told = lambda attempt: None) -> None:
        self._predict = predict
        self._told = told
        self._may_expand = may_expand
        self._estimates: dict[Knobs, Estimate] = {}

    def __call__(self, knobs: Knobs) -> Estimate:
        native = _native(knobs)
        if native not in self._estimates:
            self._estimates[native] = self._expanded(self._predict(native if self._may_expand else knobs))
            self._told(_attempt(self._estimates[native]))
        return self._estimates[native]

    def knows(self, knobs: Knobs) -> bool:
        """Whether these knobs have been rehearsed."""
        return _native(knobs) in self._estimates

    def _expanded(self, estimate: Estimate) -> Estimate:
        if estimate.fits or not self._may_expand:
            return estimate
        expanded = estimate.with_expandable_segments()
        return expanded if expanded.required_bytes < estimate.required_bytes else estimate

    def weights_exceed(self, knobs: Knobs) -> bool:
        """Whether the same weights were beyond the budget as soon as they were loaded: nothing can make that fit."""
        return any(
            _same_weights(knobs, estimate.knobs)
            and estimate.memory.phases.get(Phase.LOAD, 0) + estimate.outside_bytes > estimate.budget_bytes
            for estimate in self._estimates.values()
        )

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """What was rehearsed, in order."""
        return tuple(self._estimates.values())

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The same as a plan records it."""
        return tuple(_attempt(estimate) for estimate in self._estimates.values())


def _attempt(estimate: Estimate) -> Attempt:
    return Attempt(knobs=estimate.knobs, required_bytes=estimate.required_bytes, budget_bytes=estimate.budget_bytes)


def _native(knobs: Knobs) -> Knobs:
    """Where the user decides on expandable segments, all of a search's knobs agree, whatever an estimate says."""
    return replace(knobs, expandable_segments=False)


def _same_weights(one: Knobs, other: Knobs) -> bool:
    """With LoRA a reference model may be left out, and so counts."""
    names = ("use_peft", "dtype", "load_in_4bit", "load_in_8bit", "use_bnb_nested_quant")
    return all(getattr(one, name) == getattr(other, name) for name in names)
