"""``from autotrain_mem import PPOTrainer``. Imported only where it is asked for: TRL 1.13 has no PPO any more."""

from __future__ import annotations

from autotrain_mem.drop_in.trainers import Planned
from autotrain_mem.trainers.ppo_trainer import PPOConfig
from autotrain_mem.trainers.ppo_trainer import PPOTrainer as _PPOTrainer


class PPOTrainer(Planned, _PPOTrainer, method="ppo", config_class=PPOConfig):
    """TRL 1.12's PPOTrainer, made to keep what its config promises, with settings that fit the device.

    Its four models are objects, so that no plan loads them otherwise.
    """
