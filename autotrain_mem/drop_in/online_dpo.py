"""``from autotrain_mem import OnlineDPOTrainer``. Imported only where it is asked for: TRL warns then."""

from __future__ import annotations

from trl.experimental.online_dpo import OnlineDPOConfig

from autotrain_mem.drop_in.build import Planned
from autotrain_mem.trainers.online_dpo import OnlineDPOTrainer as _OnlineDPOTrainer


class OnlineDPOTrainer(Planned, _OnlineDPOTrainer, method="online_dpo", config_class=OnlineDPOConfig):
    """TRL's experimental OnlineDPOTrainer with settings that fit the device; see :class:`SFTTrainer`.

    Its gradients are means over an optimizer step, where TRL's grow with ``gradient_accumulation_steps``. Its model is
    an object, so that no plan loads it otherwise.
    """
