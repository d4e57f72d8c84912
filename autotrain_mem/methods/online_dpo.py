"""Adapts online direct preference optimization with TRL's experimental OnlineDPOTrainer.

It is built as in TRL's example (``examples/scripts/dpo_online.py``). Reward functions are found by name, as for GRPO.
"""

import dataclasses
from functools import partial
from typing import Any

from autotrain_mem.methods import online
from autotrain_mem.methods.configs import Configs, experimental_parser, loading_arguments, trusts_remote_code
from autotrain_mem.methods.orpo import with_policy
from autotrain_mem.methods.reward_functions import try_once
from autotrain_mem.methods.row_lengths import RowLengths
from autotrain_mem.support.errors import DatasetFormatError, UsageError
from autotrain_mem.types import Knobs

takes_model_name = False
samples_each_micro_step = True
joins_sides = True


def make_parser() -> Any:
    """Returns a TRL parser with GRPO's ``--reward_funcs`` in addition to the config's ``--reward_model_path``."""
    from trl import ScriptArguments
    from trl.experimental.online_dpo import OnlineDPOConfig
    from trl.scripts.grpo import GRPOScriptArguments

    functions = GRPOScriptArguments.__dataclass_fields__["reward_funcs"]
    field = dataclasses.field(default=functions.default, metadata=functions.metadata)
    rewards = ("reward_funcs", list[str] | None, field)
    script = dataclasses.make_dataclass("OnlineDPOScriptArguments", [rewards], bases=(ScriptArguments,))
    return experimental_parser("online_dpo", OnlineDPOConfig, script)


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """Builds the trainer. A reward model is loaded in the policy's dtype, without quantization."""
    from transformers import AutoTokenizer

    from autotrain_mem.trainers.online_dpo_trainer import OnlineDPOTrainer

    judge, loading, reads = filled.training.reward_model_path, loading_arguments(filled), stub
    if judge and reads is None:
        reads = AutoTokenizer.from_pretrained(judge, trust_remote_code=trusts_remote_code(filled))
    rewards = online.rewards_of(filled, judge, rehearsed=stub is not None)
    judges = [reads if reward is judge else None for reward in rewards]
    return OnlineDPOTrainer(
        reward_funcs=[online.reward_model(filled, loading) if reward is judge else reward for reward in rewards],
        reward_processing_classes=judges,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        **with_policy(filled, model, stub),
    )


worst_rows = online.worst_rows
rows_editor = online.rows_editor


def micro_steps_per_generation(filled: Configs, knobs: Knobs) -> int:
    """Returns 1, since each micro-step samples its own completions."""
    return 1


def row_lengths(filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Counts the tokens of every prompt with its chat template. Raises DatasetFormatError for rows with images."""
    from autotrain_mem.trainers.online_dpo_trainer import prompt_ids

    if "image" in split.column_names:
        raise DatasetFormatError(
            "Rows with images are not supported yet in online DPO: its processing of images is not rehearsed.",
            hint="Remove the column image; grpo and rloo train on images.",
        )
    try_once(filled.script.reward_funcs or [], split)
    return online.prompt_lengths(split, partial(prompt_ids, tokenizer=tokenizer), processes=None)


def check(filled: Configs) -> None:
    """Raises UsageError for arguments that fail later in the trainer or are not rehearsed. Calls ``online.check``."""
    training = filled.training
    if filled.is_evaluated:  # transformers/trainer.py: prediction_step passes the prompts' text to the model
        raise UsageError(
            "Online DPO cannot be evaluated: TRL's trainer would fail at the first evaluation, since it passes "
            "text to the model.",
            hint="Remove --eval_strategy; rewards and margins of the training rows are logged.",
        )
    if isinstance(training.beta, list):  # online_dpo_trainer.py: beta indexes the list by the epoch, a fraction
        raise UsageError(
            f"--beta with {len(training.beta)} values makes TRL's trainer fail at the first step.",
            hint="Give one value.",
        )
    if training.use_vllm:
        raise UsageError(
            "--use_vllm is not supported yet in online DPO: copying the weights to vLLM is not rehearsed.",
            hint="Remove it; grpo and rloo generate with vLLM.",
        )
    if training.remove_unused_columns:
        raise UsageError(
            "--remove_unused_columns would remove the prompts, since the model does not read them.", hint="Remove it."
        )
    if str(getattr(training.train_sampling_strategy, "value", training.train_sampling_strategy)) == "group_by_length":
        raise UsageError(
            "--train_sampling_strategy group_by_length needs input_ids, but prompts are text until a step begins.",
            hint="Remove it.",
        )
    online.check(filled)


def why_not_split(trainer: Any) -> str | None:
    """Returns why an unknown loss cannot be split. None for the known losses, which are means over pairs."""
    if trainer.args.loss_type not in ("sigmoid", "ipo"):
        return f"it is unknown how loss_type {trainer.args.loss_type} averages pairs"
    return None
