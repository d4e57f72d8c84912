"""Restores counters and merges metrics where a micro-batch took several calls, or each rank went on alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from autotrain_mem.methods.interface import Basis
from autotrain_mem.training.guard.batch_split import Piece, count
from autotrain_mem.training.guard.ranks import Ranks

COUNTED = (
    *("_step", "_current_train_step_time", "_total_train_tokens"),
    *("_entropy_window_stats", "entropy_coef", "_last_world_entropy"),
)
"""Attributes that a call of ``training_step`` or ``compute_loss`` changes, beside the numbers that it logs.

Source: ``trl/trainer/{sft,reward,dpo,grpo,rloo}_trainer.py``. They hold numbers, or a tensor that is replaced.
"""

KEPT_IN = ("_metrics", "_stored_metrics")
"""Attributes in which trainers keep what they log next, by mode; the second in ``trl/experimental/cpo/cpo_trainer.py``,
which deletes a mode's with each log."""

TOTALS = ("_total_train_tokens",)
"""Those that TRL counts over all ranks, inside ``compute_loss``."""

Numbers = dict[str, list[float]]
Entry = tuple[Piece, Numbers]
"""The part of a micro-batch that one call was given, and the numbers that it logged."""
BasisOf = Callable[[str], Basis]


class MetricsLedger:
    """Keeps counters and metrics of one micro-batch, from its first call to its last.

    Args:
        mode: ``train`` or ``eval``: under which of the two the trainer logs.
        ranks: That may each do a micro-step alone.
    """

    def __init__(self, trainer: Any, mode: str, ranks: Ranks) -> None:
        self._trainer = trainer
        self._mode = mode
        self._ranks = ranks
        self._before: dict[str, Any] = {}
        self._totals_before = {name: getattr(trainer, name) for name in TOTALS if hasattr(trainer, name)}
        self._settled: dict[str, Any] | None = None
        self._entries: list[Entry] = []
        held = (getattr(trainer, name, None) for name in KEPT_IN)
        self._metrics: Any = next((each for each in held if isinstance(each, dict)), {})
        is_known = mode in self._metrics or isinstance(self._metrics, defaultdict)
        self._all: Any = self._metrics[mode] if is_known else None

    def begin(self) -> None:
        """Begin a call. All the calls of one micro-batch are the same step of the trainer."""
        self._before = {name: getattr(self._trainer, name) for name in COUNTED if hasattr(self._trainer, name)}
        if self._all is not None:
            self._metrics[self._mode] = defaultdict(list)

    def undo(self) -> None:
        """Forget what a call that failed counted and logged."""
        for name, value in self._before.items():
            setattr(self._trainer, name, value)
        self._close()

    def settle(self, piece: Piece) -> None:
        """Keep what a call logged whose loss was made and gathered: what its parts log does not count any more."""
        self._settled = {name: getattr(self._trainer, name) for name in self._totals_before}
        if self._all is not None:
            self._entries = [(piece, dict(self._metrics[self._mode]))]

    def keep(self, piece: Piece, *, is_last: bool) -> None:
        """Keep what a call that went through logged for its part."""
        if self._all is not None and self._settled is None:
            self._entries.append((piece, dict(self._metrics[self._mode])))
        if not is_last and "_step" in self._before:
            self._trainer._step = self._before["_step"]
        self._close()

    def _close(self) -> None:
        """Let the trainer log where it always does."""
        if self._all is not None:
            self._metrics[self._mode] = self._all

    def write(self, whole: Piece, basis_of: BasisOf) -> None:
        """Log the micro-batch as one; that of all ranks, where each did its own alone."""
        numbers = _merged(self._entries, basis_of)
        if self._ranks.is_apart:
            numbers = self._merged_over_ranks(whole, numbers, basis_of)
        for name, value in (self._settled or {}).items():
            setattr(self._trainer, name, value)
        for name, values in numbers.items():
            if name == "num_tokens":  # not a list that grows: always the sum of all so far
                self._all[name] = values
            else:
                self._all[name].extend(values)

    def _merged_over_ranks(self, whole: Piece, numbers: Numbers, basis_of: BasisOf) -> Numbers:
        """Merge as TRL gathers: weighted by what a number is over; sums are averaged over the ranks."""
        weights = {name: count(whole, basis_of(name)) for name in numbers}
        added = {name: getattr(self._trainer, name) - before for name, before in self._totals_before.items()}
        ranks = self._ranks.gather((numbers, weights, added))
        for name, before in self._totals_before.items():
            setattr(self._trainer, name, before + sum(added[name] for _, _, added in ranks))
        merged = {}
        for name in dict.fromkeys(name for numbers, _, _ in ranks for name in numbers):
            lists = [(weights[name], numbers[name]) for numbers, weights, _ in ranks if numbers.get(name)]
            basis = basis_of(name)
            merged[name] = _merge(Basis.UNITS if basis in (Basis.SUM, Basis.WHOLE) else basis, lists)
        if "num_tokens" in merged:
            merged["num_tokens"] = [getattr(self._trainer, name) for name in self._totals_before]
        return merged


def _merged(entries: Sequence[Entry], basis_of: BasisOf) -> Numbers:
    """Merge each name's numbers into what the whole micro-batch would have logged; one call's stay as they are."""
    if len(entries) < 2:
        return entries[0][1] if entries else {}
    names = dict.fromkeys(name for _, numbers in entries for name in numbers)
    merged = {}
    for name in names:
        basis = basis_of(name)
        lists = [(count(piece, basis), numbers[name]) for piece, numbers in entries if numbers.get(name)]
        merged[name] = lists[-1][1] if name == "num_tokens" else _merge(basis, lists)
    return merged


def _merge(basis: Basis, lists: list[tuple[float, list[float]]]) -> list[float]:
    """Merge lists of numbers one by one, each list with its weight."""
    rounds = range(max((len(values) for _, values in lists), default=0))
    return [_one(basis, [(weight, values[at]) for weight, values in lists if at < len(values)]) for at in rounds]


def _one(basis: Basis, numbers: list[tuple[float, float]]) -> float:
    valid = [(weight, number) for weight, number in numbers if not math.isnan(number)]
    values = [number for _, number in valid]
    if not valid:
        return math.nan
    if basis in (Basis.SUM, Basis.WHOLE):
        return math.fsum(values)
    if basis in (Basis.LOWEST, Basis.HIGHEST):
        return min(values) if basis is Basis.LOWEST else max(values)
    total = math.fsum(weight for weight, _ in valid)
    return math.fsum(weight * value for weight, value in valid) / total if total else 0.0
