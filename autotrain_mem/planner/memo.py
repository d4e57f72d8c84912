"""Every rehearsal is made once and remembered."""

from __future__ import annotations

from collections.abc import Callable

from autotrain_mem.spec import Attempt, Estimate, Knobs

Predict = Callable[[Knobs], Estimate]
"""Rehearses one point: 1 to 20 seconds."""


class Memo:
    """A ``Predict`` that answers a repeated question from memory and keeps what was asked, in order."""

    def __init__(self, predict: Predict) -> None:
        self._predict = predict
        self._estimates: dict[Knobs, Estimate] = {}

    def __call__(self, knobs: Knobs) -> Estimate:
        if knobs not in self._estimates:
            self._estimates[knobs] = self._predict(knobs)
        return self._estimates[knobs]

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """What was rehearsed, in order."""
        return tuple(self._estimates.values())

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The same as a plan records it."""
        return tuple(
            Attempt(knobs=knobs, required_bytes=estimate.required_bytes, budget_bytes=estimate.budget_bytes)
            for knobs, estimate in self._estimates.items()
        )
