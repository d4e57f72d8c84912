"""Gives PPO's classes where the installed TRL has them, and a plain error where it has not.

Nothing of TRL is imported before one of the two functions is called.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

from autotrain_mem.support.errors import MissingExtraError


def ppo_trainer_class() -> type[Any]:
    """Give TRL's PPOTrainer, made to keep what its config promises (:mod:`autotrain_mem.trainers.ppo_trainer`).

    Raises:
        MissingExtraError: the installed TRL has no PPO.
    """
    _check_installed()
    from autotrain_mem.trainers.ppo_trainer import PPOTrainer

    return PPOTrainer


def ppo_config_class() -> type[Any]:
    """Give TRL's PPOConfig; raises as :func:`ppo_trainer_class`."""
    _check_installed()
    from trl.experimental.ppo import PPOConfig

    return PPOConfig  # type: ignore[no-any-return]  # TRL is untyped to mypy


def _check_installed() -> None:
    with warnings.catch_warnings():
        # Whoever asks for PPO has no other; TRL warns of all that is experimental, once, as it is imported.
        warnings.filterwarnings("ignore", message=".*trl.experimental")
        if importlib.util.find_spec("trl.experimental.ppo") is not None:
            return
    import trl

    raise MissingExtraError(
        f"PPO needs trl 1.12, the last one that has it; trl {trl.__version__} is installed.",
        hint="pip install 'autotrain_mem[ppo]', or train with GRPO or RLOO, which need no value model.",
    )
