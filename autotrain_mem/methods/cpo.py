"""Contrastive preference optimization, and SimPO, with the CPOTrainer of ``trl.experimental``."""

from __future__ import annotations

from functools import partial
from typing import Any

from autotrain_mem.methods import one_policy
from autotrain_mem.methods.configs import experimental_parser, fill

HOME = "trl.experimental.cpo"
make_parser = partial(experimental_parser, "cpo", "CPOConfig")
configs = partial(fill, make_parser)
build_trainer = partial(one_policy.build_trainer, HOME)
worst_rows = one_policy.worst_rows
rows_editor = one_policy.rows_editor
row_lengths = partial(one_policy.row_lengths, HOME)
check = one_policy.check


def why_not_split(trainer: Any) -> str | None:
    """Say that two kinds of means are added (``cpo_trainer.py: get_batch_loss_metrics``); SimPO's is one over pairs."""
    return "its loss is a mean over the chosen answers' tokens and a mean over pairs" if trainer.cpo_alpha else None
