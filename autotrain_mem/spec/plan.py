"""The decision: settings that fit, what was changed to get there, and what was tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotrain_mem.spec.estimate import Estimate
from autotrain_mem.spec.knobs import Knobs, Lever

PLAN_SCHEMA = "autofit.plan/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One point that the search rehearsed."""

    knobs: Knobs
    required_bytes: int
    budget_bytes: int

    @property
    def fits(self) -> bool:
        return self.required_bytes <= self.budget_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "knobs": self.knobs.to_json(),
            "required_bytes": self.required_bytes,
            "budget_bytes": self.budget_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Settings that fit the budget, with the way they were found."""

    method: str
    """The TRL trainer: one of ``spec.job.METHODS``."""
    estimate: Estimate
    levers: tuple[Lever, ...]
    """What differs from TRL's defaults, in the ladder's order; empty when TRL's defaults fit as they are."""
    attempts: tuple[Attempt, ...]
    truncated_tokens_fraction: float | None
    """Share of the dataset's tokens that max_length cuts; None when the dataset was not read."""
    truncated_rows_fraction: float | None
    seconds: float
    prompt_length: int | None = None
    """Tokens of the longest prompt planned for; None for methods whose rows are whole texts."""

    @property
    def knobs(self) -> Knobs:
        return self.estimate.knobs

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": PLAN_SCHEMA,
            "method": self.method,
            "knobs": self.knobs.to_json(),
            "effective_batch_size": self.knobs.effective_batch_size,
            "levers": [lever.to_json() for lever in self.levers],
            "estimate": self.estimate.to_json(),
            "attempts": [attempt.to_json() for attempt in self.attempts],
            "truncated_tokens_fraction": self.truncated_tokens_fraction,
            "truncated_rows_fraction": self.truncated_rows_fraction,
            "prompt_length": self.prompt_length,
            "seconds": round(self.seconds, 3),
        }
