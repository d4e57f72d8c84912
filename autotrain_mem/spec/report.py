"""What a training run did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RUN_SCHEMA = "autofit.run/1"
RUN_NAME = "run.json"
"""The file in the output folder that holds a Report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One finished run: predicted against measured. Sizes in bytes, time in seconds."""

    output_dir: str
    steps: int
    first_loss: float | None
    last_loss: float | None
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    """Peak allocated bytes during training; None where nothing measures them (plain CPU training)."""
    seconds: float

    @property
    def prediction_error(self) -> float | None:
        """(predicted - measured) / measured; None when nothing was measured."""
        if not self.measured_peak_bytes:
            return None
        return (self.predicted_peak_bytes - self.measured_peak_bytes) / self.measured_peak_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": RUN_SCHEMA,
            "output_dir": self.output_dir,
            "steps": self.steps,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "prediction_error": self.prediction_error,
            "seconds": round(self.seconds, 3),
        }
