"""REINFORCE leave-one-out with TRL's RLOOTrainer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from autotrain_mem.rehearsal import online
from autotrain_mem.rehearsal.configs import Configs, fill, trainer_arguments
from autotrain_mem.rehearsal.methods.method import EditRows
from autotrain_mem.spec import Knobs

NAME = "RLOO"
FORMATS = online.FORMATS
MODEL_KINDS = ("causal",)


def make_parser() -> Any:
    """TRL's own parser of ``trl rloo``."""
    from trl.scripts.rloo import make_parser as make_trl_parser

    return make_trl_parser(prog="autofit rloo")


def configs(arguments: Mapping[str, Any]) -> Configs:
    """TRL's dataclasses, filled."""
    from trl import RLOOConfig
    from trl.scripts.rloo import RLOOScriptArguments

    return fill(RLOOScriptArguments, RLOOConfig, arguments)


def rehearsal_changes(arguments: Mapping[str, Any], knobs: Knobs) -> dict[str, Any]:
    """The generation keeps its true size, though a rehearsal takes fewer micro-steps."""
    return online.true_generation(arguments, knobs)


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """The installed RLOOTrainer as ``trl rloo`` builds it; with ``beta`` above 0 it loads a reference model too."""
    from trl import RLOOTrainer

    rewards = online.rewards_of(filled, rehearsed=stub is not None)
    return RLOOTrainer(
        reward_funcs=rewards,
        reward_processing_classes=online.reward_tokenizers(rewards, stub),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        **trainer_arguments(filled, model, stub),
    )


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Prompts of ``length`` tokens; completions are as long as they may get, by the stand-in for generation."""
    return online.worst_prompts(length, rows)


def rows_editor(filled: Configs) -> EditRows:
    """The rows are prompts still, and are padded when they are tokenized."""
    return online.first_group_shortened(filled)


def stage_directions(trainer: Any, filled: Configs, knobs: Knobs) -> AbstractContextManager[None]:
    """A generation in every rehearsed step."""
    return online.generation_every_step(trainer, knobs.gradient_accumulation_steps)


def row_lengths(filled: Configs, split: Any, tokenizer: Any) -> list[int]:
    """Tokens of every prompt."""
    return online.prompt_lengths(filled, split, tokenizer)


def check(filled: Configs, *, to_train: bool) -> None:
    """A reward is needed to train."""
    online.check(filled, to_train=to_train)
