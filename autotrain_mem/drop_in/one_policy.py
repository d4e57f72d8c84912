"""``from autotrain_mem import ORPOTrainer``. Imported only where it is asked for: ``trl.experimental`` warns then."""

from __future__ import annotations

from trl.experimental.cpo import CPOConfig
from trl.experimental.cpo import CPOTrainer as _CPOTrainer
from trl.experimental.orpo import ORPOConfig
from trl.experimental.orpo import ORPOTrainer as _ORPOTrainer

from autotrain_mem.drop_in.build import Planned


class ORPOTrainer(Planned, _ORPOTrainer, method="orpo", config_class=ORPOConfig):  # type: ignore[misc]
    """TRL's experimental ORPOTrainer with settings that fit the device; see :class:`SFTTrainer`.

    Its model is an object, so that no plan loads it otherwise.
    """


class CPOTrainer(Planned, _CPOTrainer, method="cpo", config_class=CPOConfig):  # type: ignore[misc]
    """TRL's experimental CPOTrainer, as :class:`ORPOTrainer`; SimPO is ``loss_type="simpo"``."""
