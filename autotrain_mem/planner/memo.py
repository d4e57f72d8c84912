"""Every rehearsal is made once and remembered."""

from __future__ import annotations

from collections.abc import Callable

from autotrain_mem.spec import Attempt, Estimate, Knobs, Phase

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

    def knows(self, knobs: Knobs) -> bool:
        """Whether these knobs have been rehearsed."""
        return knobs in self._estimates

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
        return tuple(
            Attempt(knobs=knobs, required_bytes=estimate.required_bytes, budget_bytes=estimate.budget_bytes)
            for knobs, estimate in self._estimates.items()
        )


def _same_weights(one: Knobs, other: Knobs) -> bool:
    """With LoRA a reference model may be left out, and so counts."""
    names = ("use_peft", "dtype", "load_in_4bit", "load_in_8bit", "use_bnb_nested_quant")
    return all(getattr(one, name) == getattr(other, name) for name in names)
