"""Adapts group relative policy optimization with TRL's GRPOTrainer."""

from functools import partial
from typing import Any

from autotrain_mem.methods import online
from autotrain_mem.methods.interface import AxolotlFacts, Basis

liger_since = "1.16"
axolotl = AxolotlFacts(
    keys={"rl": "grpo"}, notes=("datasets: rows with a prompt column need no type, since TRL reads them as they are",)
)
base = online
build_trainer = partial(online.build_trainer, "GRPOTrainer")

_LOSS_BASES = {
    "grpo": Basis.UNITS,
    "sapo": Basis.UNITS,
    "dr_grpo": Basis.UNITS,
    "luspo": Basis.UNITS,
    "bnpo": Basis.TOKENS,
    "dapo": Basis.WHOLE,
    "cispo": Basis.WHOLE,
    "vespo": Basis.WHOLE,
}
"""``loss_type`` -> what the loss is averaged over (``trl/trainer/grpo_trainer.py: _compute_loss``).

``UNITS`` is a mean over completions, and ``TOKENS`` a mean over the micro-batch's tokens. ``WHOLE`` is a sum divided by
``num_items_in_batch``, the tokens of a whole generation.
"""


def why_not_split(trainer: Any) -> str | None:
    """Returns why the loss cannot be split, or None: it is unknown, or depends on all tokens of a micro-batch."""
    if trainer.loss_type not in _LOSS_BASES:
        return f"it is unknown how loss_type {trainer.loss_type} averages rows"
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        return "top_entropy_quantile is computed over all tokens of the micro-batch"
    if getattr(trainer, "use_adaptive_entropy", False):
        return "the adaptive entropy bonus is computed over the whole micro-batch"
    if getattr(trainer, "_entropy_bonus_enabled", False) and trainer.loss_type != "bnpo":
        return f"the entropy bonus is a mean over tokens, and loss_type {trainer.loss_type} is not"
    return None


def loss_basis(trainer: Any, *, is_counted: bool) -> Basis:
    """Returns what the loss of this ``loss_type`` is averaged over. TRL ignores transformers' token count."""
    return _LOSS_BASES.get(trainer.loss_type, Basis.UNITS)
