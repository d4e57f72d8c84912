"""``from autotrain_mem import SFTTrainer`` in the place of ``from trl import SFTTrainer``, and its four siblings.

Each takes what TRL's own takes, and ``autofit=AutoFit(...)`` beside it. ``trainer.plan`` holds the plan.
"""

from __future__ import annotations

from typing import Any

import trl

from autotrain_mem.drop_in.build import Shown, build, called
from autotrain_mem.drop_in.guarded_methods import kept_alive
from autotrain_mem.spec import Plan
from autotrain_mem.spec.autofit import AutoFit


@kept_alive
class SFTTrainer(trl.SFTTrainer):  # type: ignore[misc]  # TRL is untyped to mypy
    """TRL's SFTTrainer with settings that fit the device.

    ``SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=rows).train()`` is planned before the model is loaded.

    Args:
        autofit: How to plan; all else is TRL's.

    Raises:
        DoesNotFitError: nothing that is allowed fits; the message holds the nearest that would.
        AutofitError: see ``autotrain_mem.errors``. What TRL refuses is refused by TRL.
    """

    plan: Plan | None
    """None where there are no rows to train on."""

    __signature__ = Shown()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return called(super().__new__(cls), args, kwargs)

    def __init__(self, *args: Any, autofit: AutoFit | None = None, **kwargs: Any) -> None:
        build(self, "sft", super().__init__, trl.SFTConfig, args, kwargs, autofit)


@kept_alive
class RewardTrainer(trl.RewardTrainer):  # type: ignore[misc]
    """TRL's RewardTrainer with settings that fit the device; see :class:`SFTTrainer`."""

    plan: Plan | None

    __signature__ = Shown()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return called(super().__new__(cls), args, kwargs)

    def __init__(self, *args: Any, autofit: AutoFit | None = None, **kwargs: Any) -> None:
        build(self, "reward", super().__init__, trl.RewardConfig, args, kwargs, autofit)


@kept_alive
class DPOTrainer(trl.DPOTrainer):  # type: ignore[misc]
    """TRL's DPOTrainer with settings that fit the device; see :class:`SFTTrainer`."""

    plan: Plan | None

    __signature__ = Shown()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return called(super().__new__(cls), args, kwargs)

    def __init__(self, *args: Any, autofit: AutoFit | None = None, **kwargs: Any) -> None:
        build(self, "dpo", super().__init__, trl.DPOConfig, args, kwargs, autofit)


@kept_alive
class GRPOTrainer(trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer with settings that fit the device; see :class:`SFTTrainer`."""

    plan: Plan | None

    __signature__ = Shown()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return called(super().__new__(cls), args, kwargs)

    def __init__(self, *args: Any, autofit: AutoFit | None = None, **kwargs: Any) -> None:
        build(self, "grpo", super().__init__, trl.GRPOConfig, args, kwargs, autofit)


@kept_alive
class RLOOTrainer(trl.RLOOTrainer):  # type: ignore[misc]
    """TRL's RLOOTrainer with settings that fit the device; see :class:`SFTTrainer`."""

    plan: Plan | None

    __signature__ = Shown()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return called(super().__new__(cls), args, kwargs)

    def __init__(self, *args: Any, autofit: AutoFit | None = None, **kwargs: Any) -> None:
        build(self, "rloo", super().__init__, trl.RLOOConfig, args, kwargs, autofit)
