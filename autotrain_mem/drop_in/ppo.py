"""``from autotrain_mem import PPOTrainer``. Imported only where it is asked for: TRL 1.13 has no PPO any more."""

from __future__ import annotations

from typing import Any

from autotrain_mem.drop_in.build import Shown, build, called
from autotrain_mem.drop_in.guarded_methods import kept_alive
from autotrain_mem.spec import Plan
from autotrain_mem.spec.autofit import AutoFit
from autotrain_mem.trainers.ppo import ppo_config_class, ppo_trainer_class

_PPOTrainer: Any = ppo_trainer_class()


@kept_alive
class PPOTrainer(_PPOTrainer):  # type: ignore[misc]  # TRL is untyped to mypy
    """TRL 1.12's PPOTrainer, made to keep what its config promises, with settings that fit the device.

    Its four models are objects, so that no plan loads them otherwise.
    """

    plan: Plan | None

    __signature__ = Shown()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return called(super().__new__(cls), args, kwargs)

    def __init__(self, *args: Any, autofit: AutoFit | None = None, **kwargs: Any) -> None:
        build(self, "ppo", super().__init__, ppo_config_class(), args, kwargs, autofit)
