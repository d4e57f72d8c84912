"""Odds ratio preference optimization with the ORPOTrainer of ``trl.experimental``: pairs, and no reference."""

from __future__ import annotations

from functools import partial
from typing import Any

from autotrain_mem.methods import one_policy
from autotrain_mem.methods.configs import experimental_parser, fill

HOME = "trl.experimental.orpo"
make_parser = partial(experimental_parser, "orpo", "ORPOConfig")
configs = partial(fill, make_parser)
build_trainer = partial(one_policy.build_trainer, HOME)
worst_rows = one_policy.worst_rows
rows_editor = one_policy.rows_editor
row_lengths = partial(one_policy.row_lengths, HOME)
check = one_policy.check


def why_not_split(trainer: Any) -> str | None:
    """Say that the loss adds a mean over tokens to a mean over pairs (``orpo_trainer.py: get_batch_loss_metrics``)."""
    return "its loss is a mean over the chosen rows' tokens less a mean over pairs"
