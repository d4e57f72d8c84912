"""What a training run did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RUN_SCHEMA = "autofit.run/1"
REWARD_NAMES = ("reward", "objective/scores")
"""What the mean reward is called in the logs of GRPO and RLOO, and of PPO (``trl/trainer/grpo_trainer.py: log`` and
``trl/experimental/ppo/ppo_trainer.py: train``)."""
RUN_NAME = "run.json"
"""The file in the output folder that holds a Report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One finished run: predicted against measured. Sizes in bytes, time in seconds."""

    output_dir: str
    steps: int
    first_loss: float | None
    last_loss: float | None
    first_reward: float | None = None
    """Mean reward of the completions, where they are rewarded; None elsewhere."""
    last_reward: float | None = None
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
            "first_reward": self.first_reward,
            "last_reward": self.last_reward,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "prediction_error": self.prediction_error,
            "seconds": round(self.seconds, 3),
        }
