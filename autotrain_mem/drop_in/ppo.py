"""``from autotrain_mem import PPOTrainer``. Imported only where it is asked for: TRL 1.13 has no PPO any more."""

from __future__ import annotations

from typing import Any

from autotrain_mem.drop_in.build import Planned
from autotrain_mem.trainers.ppo import ppo_config_class, ppo_trainer_class

_PPOTrainer: Any = ppo_trainer_class()


class PPOTrainer(Planned, _PPOTrainer, method="ppo", config_class=ppo_config_class()):  # type: ignore[misc]  # TRL is untyped to mypy
    """TRL 1.12's PPOTrainer, made to keep what its config promises, with settings that fit the device.

    Its four models are objects, so that no plan loads them otherwise.
    """
