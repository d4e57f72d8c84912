"""Adapts proximal policy optimization with our subclass of TRL 1.12's PPOTrainer."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from autotrain_mem.methods import online
from autotrain_mem.methods.configs import (
    REHEARSED_ACCUMULATION,
    REHEARSED_STEPS,
    Configs,
    arguments_of_loaded,
    experimental_parser,
    trusts_remote_code,
)
from autotrain_mem.methods.interface import LlamaFactoryFacts
from autotrain_mem.methods.row_lengths import RowLengths, list_lengths
from autotrain_mem.methods.worst_case_text import ORDINARY_TOKEN, PADDING_TOKEN, EditRows, repeated
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Finding, Job, Knobs

takes_model_name = False
is_evaluated = False
adapter_rate = (1e-5, "tinker-cookbook's reinforcement learning after a reward model")
"""``recipes/preference/rlhf/rlhf_pipeline.py: rl_learning_rate``."""
liger_since = "1.16"
llamafactory = LlamaFactoryFacts(
    stage="ppo",
    entry={"columns": {"prompt": "prompt"}},
    rows="rows with prompt as text",
    keys={"reward_model_type": "full", "do_sample": True, "top_p": 1.0, "top_k": 0},
    renamed={
        "num_ppo_epochs": "ppo_epochs",
        "whiten_rewards": "ppo_whiten_rewards",
        "reward_model_path": "reward_model",
        "response_length": "max_new_tokens",
        "temperature": "temperature",
    },
    length_notes=("cutoff_len: cuts prompts; TRL's PPO does not",),
    notes=(
        "PPO: LLaMA-Factory uses PPO from trl 0.8.6 to 0.9.6, with a value head on the policy; TRL 1.12's PPO has a "
        "separate value model, so the prediction is only a rough guide",
    ),
)
"""The keys are those of ``train/ppo/trainer.py: CustomPPOTrainer``. There the reward model is by default an adapter."""


def missing(given: Callable[[str], object], *, to_train: bool) -> UsageError | None:
    """Returns the error for a job without a reward model, which even a plan needs; None if there is one."""
    if given("reward_model_path"):
        return None
    return UsageError(
        "PPO needs a reward model: it gives the scores, and the value model starts from it.",
        hint="Give --reward_model_path MODEL, such as one from `autofit reward`, with the policy's tokenizer.",
    )


def mini_batches(arguments: Mapping[str, Any]) -> int | None:
    """Returns ``num_mini_batches``, the number of parts into which each process splits its rows."""
    return arguments.get("num_mini_batches") or 1


def judge_of_text(arguments: Mapping[str, Any]) -> Any:
    """Returns None, since the reward model reads the policy's tokens, not text."""
    return None


def models_in_step(model: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the policy, and the reward model, from which the value model starts."""
    return (model, str(judge)) if (judge := arguments.get("reward_model_path")) else (model,)


_EVALUATED_ROWS = 8
"""transformers' default of ``per_device_eval_batch_size`` (``training_args.py``)."""


def not_counted(job: Job, knobs: Knobs) -> Iterator[str]:
    """Describes the sample completions that TRL shows, if it generates more of them at once than a rollout has
    (``ppo_trainer.py: generate_completions``)."""
    given = job.arguments
    shown = knobs.per_device_eval_batch_size or int(given.get("per_device_eval_batch_size") or _EVALUATED_ROWS)
    if (
        shown > knobs.per_device_train_batch_size * knobs.gradient_accumulation_steps
        and given.get("num_sample_generations") != 0
        and (job.is_evaluated or job.python_call is not None)
    ):
        yield (
            "the samples that PPO shows for evaluation prompts: it generates for --per_device_eval_batch_size "
            "prompts at once, more than a rollout on one GPU has"
        )


def make_parser() -> Any:
    """Returns a TRL parser. Raises MissingExtraError if the installed TRL has no PPO."""
    return experimental_parser("ppo", _config_type())


def rehearsal_changes(arguments: Mapping[str, Any], knobs: Knobs) -> dict[str, Any]:
    """Keeps the size of the plan's rollout, which is generated at once, and sets one epoch over it."""
    episodes = knobs.effective_batch_size * REHEARSED_STEPS
    return {
        "gradient_accumulation_steps": knobs.gradient_accumulation_steps,
        "num_ppo_epochs": 1,
        "num_sample_generations": 0,
        "total_episodes": episodes,
    }


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """Builds our PPOTrainer. Reward and value model are loaded from ``--reward_model_path``, without quantization."""
    from transformers import AutoTokenizer
    from trl.trainer.utils import create_model_from_path

    from autotrain_mem.trainers.ppo_trainer import PPOTrainer

    common, loading = arguments_of_loaded(filled, model, stub)
    own = filled.training.model_init_kwargs
    value_model, reward_model = online.reward_model(filled, own), online.reward_model(filled, own)
    tokenizer = stub or AutoTokenizer.from_pretrained(
        model,
        padding_side="left",  # as generation needs
        trust_remote_code=trusts_remote_code(filled),
        revision=filled.model.model_revision,
    )
    return PPOTrainer(
        args=filled.training,
        processing_class=tokenizer,
        model=create_model_from_path(model, **loading),
        ref_model=None if common["peft_config"] is not None else create_model_from_path(model, **loading),
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=_tokenized(train_dataset, tokenizer),
        eval_dataset=None if eval_dataset is None else _tokenized(eval_dataset, tokenizer),
        peft_config=common["peft_config"],
    )


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Makes prompts of ``length`` tokens that begin with padding, like most prompts of a real rollout."""
    return repeated({"input_ids": [PADDING_TOKEN, *[ORDINARY_TOKEN] * (length - 1)][-length:]}, rows)


def rows_editor(filled: Configs) -> EditRows:
    """Returns ``list``, which changes no row, since the rows already begin with padding."""
    return list


@contextmanager
def training_patches(trainer: Any, filled: Configs, knobs: Knobs) -> Iterator[None]:
    """Makes a rehearsal train on two micro-batches of each rollout. The rollout keeps its size, since the constructor
    has already created the dataloader (trl/experimental/ppo/ppo_trainer.py: train and __init__)."""
    arguments = trainer.args
    steps = min(REHEARSED_ACCUMULATION, arguments.gradient_accumulation_steps)
    arguments.local_batch_size = arguments.local_mini_batch_size = steps * arguments.per_device_train_batch_size
    trainer.accelerator.gradient_accumulation_steps = steps
    yield


def passes(arguments: Mapping[str, Any]) -> int:
    """Returns ``num_ppo_epochs``. A rehearsal makes one epoch."""
    return int(arguments.get("num_ppo_epochs") or _config_type().num_ppo_epochs)


def optimizer_steps(rows: int, epochs: float, knobs: Knobs, arguments: Mapping[str, Any]) -> int:
    """Counts the rollouts of ``total_episodes`` completions (trl/experimental/ppo/ppo_trainer.py: __init__)."""
    return math.ceil((arguments.get("total_episodes") or int(epochs * rows)) / knobs.effective_batch_size)


def micro_steps_per_generation(filled: Configs, knobs: Knobs) -> int:
    """Returns the number of micro-steps in a rollout."""
    return knobs.gradient_accumulation_steps


def row_lengths(filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Counts the tokens of every prompt. Raises the errors that the trainer's constructor would raise."""
    from autotrain_mem.trainers import ppo_checks

    ppo_checks.refuse(filled.training, tokenizer)
    if "input_ids" in split.column_names:
        return RowLengths(longer=list_lengths(split, "input_ids"))
    tokenize = partial(online.prompt_ids, tokenizer=tokenizer)
    return online.prompt_lengths(split, tokenize, processes=filled.training.dataset_num_proc)


def tokenizer_findings(filled: Configs, tokenizer: Any) -> Iterator[Finding]:
    """Yields the problems for which the trainer's constructor would raise an error."""
    from autotrain_mem.trainers import ppo_checks

    for message, cure in ppo_checks.problems(filled.training, tokenizer):
        yield Finding(kind="error", message=message, cure=cure)


def why_not_split(trainer: Any) -> str | None:
    """Always returns a reason: the guard cannot split the batches of PPO's own training loop."""
    return f"it is unknown how {type(trainer).__name__} averages rows"


def _config_type() -> Any:
    from autotrain_mem.trainers.ppo_trainer import PPOConfig

    return PPOConfig


def _tokenized(split: Any, tokenizer: Any) -> Any:
    """Returns the rows with ``input_ids`` only, for the trainer's collator. Conversations get their chat template."""
    if "input_ids" in split.column_names:
        return split.select_columns(["input_ids"])
    tokenize = partial(online.prompt_ids, tokenizer=tokenizer)
    return split.map(lambda row: {"input_ids": tokenize(row["prompt"])}, remove_columns=split.column_names)
