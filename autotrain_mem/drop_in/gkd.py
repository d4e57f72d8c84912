"""``from autotrain_mem import GKDTrainer``. Imported only where it is asked for: ``trl.experimental`` warns then."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from trl.experimental.gkd import GKDConfig
from trl.experimental.gkd import GKDTrainer as _GKDTrainer

from autotrain_mem.drop_in.build import Planned


class _Quantizing(_GKDTrainer):  # type: ignore[misc]  # TRL is untyped to mypy
    """Takes a quantization of the student beside its name, as the trainer does that TRL's derives from."""

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

    A teacher that is given by its name is loaded as ``GKDConfig(teacher_model_init_kwargs=...)`` says, whatever the
    plan makes of the student.
    """
