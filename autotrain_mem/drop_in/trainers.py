"""``from autotrain_mem import SFTTrainer`` in the place of ``from trl import SFTTrainer``, and its siblings.

Each takes what TRL's own takes, and ``autofit=AutoFit(...)`` beside it. ``trainer.plan`` holds the plan.
"""

from __future__ import annotations

import trl

from autotrain_mem.drop_in.planned import Planned


class SFTTrainer(Planned, trl.SFTTrainer, method="sft", config_class=trl.SFTConfig):  # type: ignore[misc]  # TRL is untyped to mypy
    """TRL's SFTTrainer with settings that fit the device.

    ``SFTTrainer("Qwen/Qwen2.5-0.5B", train_dataset=rows).train()`` is planned before the model is loaded.

    Args:
        autofit: How to plan; all else is TRL's.

    Raises:
        DoesNotFitError: nothing that is allowed fits; the message holds the nearest that would.
        AutofitError: see ``autotrain_mem.support.errors``. What TRL refuses is refused by TRL.
    """


class RewardTrainer(Planned, trl.RewardTrainer, method="reward", config_class=trl.RewardConfig):  # type: ignore[misc]
    """TRL's RewardTrainer with settings that fit the device; see :class:`SFTTrainer`."""


class DPOTrainer(Planned, trl.DPOTrainer, method="dpo", config_class=trl.DPOConfig):  # type: ignore[misc]
    """TRL's DPOTrainer with settings that fit the device; see :class:`SFTTrainer`."""


class KTOTrainer(Planned, trl.KTOTrainer, method="kto", config_class=trl.KTOConfig):  # type: ignore[misc]
    """TRL's KTOTrainer with settings that fit the device; see :class:`SFTTrainer`."""


class GRPOTrainer(Planned, trl.GRPOTrainer, method="grpo", config_class=trl.GRPOConfig):  # type: ignore[misc]
    """TRL's GRPOTrainer with settings that fit the device; see :class:`SFTTrainer`."""


class RLOOTrainer(Planned, trl.RLOOTrainer, method="rloo", config_class=trl.RLOOConfig):  # type: ignore[misc]
    """TRL's RLOOTrainer with settings that fit the device; see :class:`SFTTrainer`."""


class DistillationTrainer(
    Planned,
    trl.DistillationTrainer,  # type: ignore[misc]
    method="distillation",
    config_class=trl.DistillationConfig,
):
    """TRL's DistillationTrainer with settings that fit the device; see :class:`SFTTrainer`."""
