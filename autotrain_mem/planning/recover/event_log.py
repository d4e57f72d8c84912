"""Writes down what befalls a run, with the time, so that it can be shown while it trains and afterwards."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotrain_mem.support.files import JsonLines
from autotrain_mem.types.experience import EVENTS_NAME

STEP_SECONDS = 1.0
STEP_SHARE = 1 / 2000
"""Steps are written a second apart, which is how often a watcher looks, and later by this share of the time that the
run has taken: so a week adds some 13,000 lines."""
_KEPT = frozenset(
    {
        *("start", "step", "log", "incident", "restart", "checkpoint", "save_failed", "sign", "note", "not_finite"),
        *("worst_batch", "interrupted", "end"),
    }
)


@dataclass(slots=True)
class EventLog:
    """Adds a line to ``events.jsonl`` for each event that says something of a run."""

    folder: Path
    _began: float = field(default_factory=time.time)
    _step_written: float = 0.0
    _is_broken: bool = False

    def see(self, event: Mapping[str, Any]) -> None:
        """Takes the next event. A disk that is full ends no training: from then on nothing is written here."""
        kind, now = event["event"], time.time()
        if kind not in _KEPT or self._is_broken:
            return
        if kind == "step":
            if now - self._step_written < max(STEP_SECONDS, STEP_SHARE * (now - self._began)):
                return
            self._step_written = now
        try:
            JsonLines(self.folder / EVENTS_NAME).write({**event, **_logged(event), "time": round(now, 3)})
        except OSError:
            self._is_broken = True

    def end(self, ending: str, step: int | None = None) -> None:
        """Says how the run ended: ``finished``, ``interrupted`` or ``failed``."""
        self.see({"event": "end", "ending": ending, **({} if step is None else {"step": step})})


def _logged(event: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a trainer logged, without what JSON has no number for, and without the watch's own figures, which
    are in its record."""
    if event["event"] != "log":
        return {}
    logs = event["logs"].items()
    return {"logs": {name: each for name, each in logs if math.isfinite(each) and not name.startswith("memory/")}}
