"""Provides the drop-in classes of ``trl.experimental``, imported only on request since TRL warns at their import."""

import copy
import inspect
from typing import Any

from trl.experimental.cpo import CPOConfig
from trl.experimental.cpo import CPOTrainer as _CPOTrainer
from trl.experimental.gkd import GKDConfig
from trl.experimental.gkd import GKDTrainer as _GKDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig
from trl.experimental.orpo import ORPOConfig
from trl.experimental.orpo import ORPOTrainer as _ORPOTrainer

from autotrain_mem.drop_in.trainers import Planned
from autotrain_mem.trainers.online_dpo_trainer import OnlineDPOTrainer as _OnlineDPOTrainer


class _Quantizing(_GKDTrainer):  # type: ignore[misc]  # TRL is untyped to mypy
    """Accepts ``quantization_config`` for a student given by name, as TRL's SFTTrainer does."""

    def __init__(self, *args: Any, quantization_config: Any = None, **kwargs: Any) -> None:
        given = inspect.signature(_GKDTrainer).bind(*args, **kwargs).arguments
        if quantization_config is not None:
            config = given["args"] = copy.copy(given["args"])
            config.model_init_kwargs = {**(config.model_init_kwargs or {}), "quantization_config": quantization_config}
        super().__init__(**given)

    __init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            *inspect.signature(_GKDTrainer.__init__).parameters.values(),
            inspect.Parameter("quantization_config", inspect.Parameter.KEYWORD_ONLY, default=None),
        ]
    )


class GKDTrainer(Planned, _Quantizing, method="gkd", config_class=GKDConfig):
    """TRL's experimental GKDTrainer with settings that fit the device; see :class:`SFTTrainer`.

    A teacher given by name is loaded with ``GKDConfig(teacher_model_init_kwargs=...)``, whatever the plan.
    """


class ORPOTrainer(Planned, _ORPOTrainer, method="orpo", config_class=ORPOConfig):  # type: ignore[misc]
    """TRL's experimental ORPOTrainer with settings that fit the device; see :class:`SFTTrainer`.

    Its model is an object, so a plan cannot change how it is loaded.
    """


class CPOTrainer(Planned, _CPOTrainer, method="cpo", config_class=CPOConfig):  # type: ignore[misc]
    """TRL's experimental CPOTrainer; see :class:`ORPOTrainer`. SimPO is ``loss_type="simpo"``."""


class OnlineDPOTrainer(Planned, _OnlineDPOTrainer, method="online_dpo", config_class=OnlineDPOConfig):
    """TRL's experimental OnlineDPOTrainer with settings that fit the device; see :class:`SFTTrainer`.

    Its gradients are means over an optimizer step; TRL's grow with ``gradient_accumulation_steps``. Its model is an
    object, so a plan cannot change how it is loaded.
    """
