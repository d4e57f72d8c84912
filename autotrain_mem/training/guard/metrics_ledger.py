"""Restores counters and merges metrics when a micro-batch took several calls, or when ranks continued separately.

Numbers are merged as means over rows: for a split micro-batch, logged means over tokens, extremes and times are only
close to those of the whole. The loss is exact."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from autotrain_mem.training.guard.batch_split import Piece
from autotrain_mem.training.guard.ranks import Ranks

COUNTED = (
    *("_step", "_current_train_step_time", "_total_train_tokens"),
    *("_entropy_window_stats", "entropy_coef", "_last_world_entropy"),
)
"""Attributes that a call of ``training_step`` or ``compute_loss`` changes, besides the metrics that it logs.

Source: ``trl/trainer/{sft,reward,dpo,grpo,rloo}_trainer.py``. They hold numbers, or a tensor that is replaced.
"""

KEPT_IN = ("_metrics", "_stored_metrics")
"""Attributes that hold what a trainer logs next, by mode. The second is from ``trl/experimental/cpo/cpo_trainer.py``,
which deletes a mode's entry with each log."""

TOTALS = ("_total_train_tokens",)
"""Counters that TRL sums over all ranks, inside ``compute_loss``."""

Numbers = dict[str, list[float]]
Entry = tuple[float, Numbers]
"""The number of rows in one call's part, and the metrics that it logged."""


class MetricsLedger:
    """Keeps one micro-batch's counters and metrics, which the trainer logs under ``mode``: ``train`` or ``eval``."""

    def __init__(self, trainer: Any, mode: str, ranks: Ranks) -> None:
        self._trainer, self._mode, self._ranks = trainer, mode, ranks
        self._before: dict[str, Any] = {}
        self._totals_before = {name: getattr(trainer, name) for name in TOTALS if hasattr(trainer, name)}
        self._settled: dict[str, Any] | None = None
        self._entries: list[Entry] = []
        held = (getattr(trainer, name, None) for name in KEPT_IN)
        self._metrics: Any = next((each for each in held if isinstance(each, dict)), {})
        is_known = mode in self._metrics or isinstance(self._metrics, defaultdict)
        self._all: Any = self._metrics[mode] if is_known else None

    def begin(self) -> None:
        """Begins a call. All calls for one micro-batch count as the same step of the trainer."""
        self._before = {name: getattr(self._trainer, name) for name in COUNTED if hasattr(self._trainer, name)}
        if self._all is not None:
            self._metrics[self._mode] = defaultdict(list)

    def undo(self) -> None:
        """Discards what a failed call counted and logged."""
        for name, value in self._before.items():
            setattr(self._trainer, name, value)
        self._close()

    def settle(self, piece: Piece) -> None:
        """Keeps the logs of a failed call whose loss was computed and gathered; the logs of its parts are ignored."""
        self._settled = {name: getattr(self._trainer, name) for name in self._totals_before}
        if self._all is not None:
            self._entries = [(piece.members, dict(self._metrics[self._mode]))]

    def keep(self, piece: Piece, *, is_last: bool) -> None:
        """Keeps what a successful call logged for its part."""
        if self._all is not None and self._settled is None:
            self._entries.append((piece.members, dict(self._metrics[self._mode])))
        if not is_last and "_step" in self._before:
            self._trainer._step = self._before["_step"]
        self._close()

    def _close(self) -> None:
        if self._all is not None:
            self._metrics[self._mode] = self._all

    def write(self, whole: Piece) -> None:
        """Logs the micro-batch as one; if ranks continued separately, merges their metrics first."""
        numbers, totals = _merged(self._entries), self._totals_before
        if self._ranks.is_apart:
            added = {name: getattr(self._trainer, name) - before for name, before in totals.items()}
            ranks = self._ranks.gather((whole.members, numbers, added))
            numbers = _merged([(rows, numbers) for rows, numbers, _ in ranks])
            for name, before in totals.items():
                setattr(self._trainer, name, before + sum(added[name] for _, _, added in ranks))
        for name, value in (self._settled or {}).items():
            setattr(self._trainer, name, value)
        for name, values in numbers.items():
            if name == "num_tokens":  # a list of one number, the total so far
                self._all[name] = [getattr(self._trainer, total) for total in totals] or values
            else:
                self._all[name].extend(values)


def _merged(entries: Sequence[Entry]) -> Numbers:
    """Merges each metric's values, position by position, into means weighted by rows; a single call is unchanged."""
    if len(entries) < 2:
        return entries[0][1] if entries else {}
    merged = {}
    for name in dict.fromkeys(name for _, numbers in entries for name in numbers):
        lists = [(rows, numbers[name]) for rows, numbers in entries if numbers.get(name)]
        means = []
        for at in range(max((len(values) for _, values in lists), default=0)):
            valid = [(rows, values[at]) for rows, values in lists if at < len(values) and not math.isnan(values[at])]
            total = math.fsum(rows for rows, _ in valid)
            means.append(math.fsum(rows * value for rows, value in valid) / total if total else math.nan)
        merged[name] = means
    return merged
