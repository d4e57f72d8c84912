"""Provides PPOTrainer as a drop-in class. Imported only on request, since TRL 1.13 no longer has PPO."""

from autotrain_mem.drop_in.trainers import Planned
from autotrain_mem.trainers.ppo_trainer import PPOConfig
from autotrain_mem.trainers.ppo_trainer import PPOTrainer as _PPOTrainer


class PPOTrainer(Planned, _PPOTrainer, method="ppo", config_class=PPOConfig):
    """TRL 1.12's PPOTrainer with settings that fit the device, corrected to follow its config.

    Its four models are objects, so a plan cannot change how they are loaded.
    """
