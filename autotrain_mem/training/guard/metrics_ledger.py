"""Restores a trainer's counters and merges its metrics where one micro-batch took several calls."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from autotrain_mem.methods.interface import Basis
from autotrain_mem.training.guard.batch_split import Piece, count

COUNTED = (
    *("_step", "_current_train_step_time", "_total_train_tokens"),
    *("_entropy_window_stats", "entropy_coef", "_last_world_entropy"),
)
"""Attributes that a call of ``training_step`` or ``compute_loss`` changes, beside the numbers that it logs.

Source: ``trl/trainer/{sft,reward,dpo,grpo,rloo}_trainer.py``. They hold numbers, or a tensor that is replaced.
"""

Numbers = dict[str, list[float]]
Entry = tuple[Piece, Numbers]
"""The part of a micro-batch that one call was given, and the numbers that it logged."""
BasisOf = Callable[[str], Basis]


class MetricsLedger:
    """Keeps counters and metrics of one micro-batch, from its first call to its last.

    Args:
        mode: ``train`` or ``eval``: under which of the two the trainer logs.
    """

    def __init__(self, trainer: Any, mode: str) -> None:
        self._trainer = trainer
        self._mode = mode
        self._before: dict[str, Any] = {}
        self._entries: list[Entry] = []
        metrics = getattr(trainer, "_metrics", None)
        self._all: Any = metrics[mode] if isinstance(metrics, dict) and mode in metrics else None

    def begin(self) -> None:
        """Begin a call. All the calls of one micro-batch are the same step of the trainer."""
        self._before = {name: getattr(self._trainer, name) for name in COUNTED if hasattr(self._trainer, name)}
        if self._all is not None:
            self._trainer._metrics[self._mode] = defaultdict(list)

    def undo(self) -> None:
        """Forget what a call that failed counted and logged."""
        for name, value in self._before.items():
            setattr(self._trainer, name, value)
        self._close()

    def keep(self, piece: Piece, *, is_last: bool) -> None:
        """Keep what a call that went through logged for its part."""
        if self._all is not None:
            self._entries.append((piece, dict(self._trainer._metrics[self._mode])))
        if not is_last and "_step" in self._before:
            self._trainer._step = self._before["_step"]
        self._close()

    def _close(self) -> None:
        """Let the trainer log where it always does."""
        if self._all is not None:
            self._trainer._metrics[self._mode] = self._all

    def write(self, basis_of: BasisOf) -> None:
        """Log the micro-batch as one."""
        for name, values in _merged(self._entries, basis_of).items():
            if name == "num_tokens":  # not a list that grows: always the sum of all so far
                self._all[name] = values
            else:
                self._all[name].extend(values)


def _merged(entries: Sequence[Entry], basis_of: BasisOf) -> Numbers:
    """Merge each name's numbers into what the whole micro-batch would have logged; one call's stay as they are."""
    if len(entries) < 2:
        return entries[0][1] if entries else {}
    names = dict.fromkeys(name for _, numbers in entries for name in numbers)
    return {name: _merge(name, [entry for entry in entries if entry[1].get(name)], basis_of) for name in names}


def _merge(name: str, entries: list[Entry], basis_of: BasisOf) -> list[float]:
    if name == "num_tokens":
        return entries[-1][1][name]
    basis, lists = basis_of(name), [(piece, numbers[name]) for piece, numbers in entries]
    rounds = range(max((len(values) for _, values in lists), default=0))
    return [_one(basis, [(piece, values[at]) for piece, values in lists if at < len(values)]) for at in rounds]


def _one(basis: Basis, numbers: list[tuple[Piece, float]]) -> float:
    valid = [(piece, number) for piece, number in numbers if not math.isnan(number)]
    values = [number for _, number in valid]
    if not valid:
        return math.nan
    if basis in (Basis.SUM, Basis.WHOLE):
        return math.fsum(values)
    if basis in (Basis.LOWEST, Basis.HIGHEST):
        return min(values) if basis is Basis.LOWEST else max(values)
    weights = [count(piece, basis) for piece, _ in valid]
    total = math.fsum(weights)
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True)) / total if total else 0.0
