"""REINFORCE leave-one-out with TRL's RLOOTrainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotrain_mem.methods import defaults, online
from autotrain_mem.methods.configs import Configs, fill, script_parser


def make_parser() -> Any:
    """TRL's own parser of ``trl rloo``."""
    return script_parser("rloo")


def configs(arguments: Mapping[str, Any]) -> Configs:
    """TRL's dataclasses, filled."""
    from trl import RLOOConfig
    from trl.scripts.rloo import RLOOScriptArguments

    return fill(RLOOScriptArguments, RLOOConfig, arguments)


rehearsal_changes = online.rehearsal_changes


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """The installed RLOOTrainer as ``trl rloo`` builds it."""
    from trl import RLOOTrainer

    return online.build(RLOOTrainer, filled, model, train_dataset, eval_dataset, stub)


without_precomputing = online.without_precomputing
worst_rows = online.worst_rows
rows_editor = online.rows_editor
training_patches = online.training_patches
row_lengths = online.row_lengths
check = online.check
tokenizer_findings = online.tokenizer_findings
why_not_split = defaults.why_not_split
loss_basis = defaults.loss_basis
logged_basis = online.logged_basis
