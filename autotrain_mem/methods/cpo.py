"""Adapts contrastive preference optimization, and SimPO, with the CPOTrainer of ``trl.experimental``."""

from functools import partial
from typing import Any

from autotrain_mem.methods import orpo

base = orpo
build_trainer = partial(orpo.build_pairs_trainer, "trl.experimental.cpo")
row_lengths = partial(orpo.pair_row_lengths, "trl.experimental.cpo")


def why_not_split(trainer: Any) -> str | None:
    """Returns why the loss cannot be split: it adds two means (``cpo_trainer.py: get_batch_loss_metrics``). None if
    ``cpo_alpha`` is 0, as in SimPO."""
    return "its loss is a mean over the chosen answers' tokens plus a mean over pairs" if trainer.cpo_alpha else None
