"""Group relative policy optimization with TRL's GRPOTrainer."""

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
    """TRL's own parser of ``trl grpo``."""
    from trl.scripts.grpo import make_parser as make_trl_parser

    return make_trl_parser(prog="autofit grpo")


def configs(arguments: Mapping[str, Any]) -> Configs:
    """TRL's dataclasses, filled."""
    from trl import GRPOConfig
    from trl.scripts.grpo import GRPOScriptArguments

    return fill(GRPOScriptArguments, GRPOConfig, arguments)


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """The installed GRPOTrainer as ``trl grpo`` builds it."""
    from trl import GRPOTrainer

    return online.build(GRPOTrainer, filled, model, train_dataset, eval_dataset, stub)
