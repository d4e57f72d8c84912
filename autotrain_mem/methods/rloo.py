"""REINFORCE leave-one-out with TRL's RLOOTrainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotrain_mem.methods import online
from autotrain_mem.methods.configs import Configs, fill
from autotrain_mem.methods.online import (
    check,
    rehearsal_changes,
    row_lengths,
    rows_editor,
    training_patches,
    worst_rows,
)

__all__ = [
    "build_trainer",
    "check",
    "configs",
    "make_parser",
    "rehearsal_changes",
    "row_lengths",
    "rows_editor",
    "training_patches",
    "worst_rows",
]


def make_parser() -> Any:
    """TRL's own parser of ``trl rloo``."""
    from trl.scripts.rloo import make_parser as make_trl_parser

    return make_trl_parser(prog="autofit rloo")


def configs(arguments: Mapping[str, Any]) -> Configs:
    """TRL's dataclasses, filled."""
    from trl import RLOOConfig
    from trl.scripts.rloo import RLOOScriptArguments

    return fill(RLOOScriptArguments, RLOOConfig, arguments)


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """The installed RLOOTrainer as ``trl rloo`` builds it."""
    from trl import RLOOTrainer

    return online.build(RLOOTrainer, filled, model, train_dataset, eval_dataset, stub)
