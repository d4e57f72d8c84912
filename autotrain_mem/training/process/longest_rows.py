"""Leaves a probe's trainer nothing but the longest rows of its data, as the trainer itself prepared them.

Chosen after the trainer has tokenized, cut, dropped and packed, so that they are rows that the training will meet. What
the datasets library makes on the way lies in its cache, and the training that follows finds it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotrain_mem.columns import row_lengths
from autotrain_mem.methods import online
from autotrain_mem.methods.configs import REHEARSED_ACCUMULATION, REHEARSED_STEPS
from autotrain_mem.rehearsal.rehearse import EVALUATED_BATCHES
from autotrain_mem.training.longest_batch.rows import longest_rows, repeated


def take_longest(trainer: Any) -> int:
    """Leave a trainer nothing but its longest rows; returns the tokens of the longest.

    Each micro-batch is of the longest rows that there are, in order, the longest first: the first one meets no
    gradients, the second meets them, and those of the second step meet the optimizer's state too. Where there are
    fewer rows than a micro-batch has, they come more than once.
    """
    lengths = _lengths(trainer.train_dataset, trainer)
    if trainer.eval_dataset is not None and not is_ppo(trainer):
        _take_evaluated(trainer)
    count = _rows_at_once(trainer)
    chosen = repeated(longest_rows(lengths, count), count)
    if is_ppo(trainer):
        _give_rollout(trainer, trainer.train_dataset.select(chosen))
    else:
        _give_rows(trainer, trainer.train_dataset.select(chosen * (REHEARSED_ACCUMULATION * REHEARSED_STEPS)))
    return _trained_tokens(max(lengths), trainer)


def _lengths(rows: Any, trainer: Any) -> Sequence[int]:
    """Tokens of every row of prepared data; of prompts that are not, as many as the trainer will make of them."""
    lengths = row_lengths(rows)
    if lengths is not None:
        return lengths
    options = getattr(trainer.args, "chat_template_kwargs", None) or {}
    processes = getattr(trainer.args, "dataset_num_proc", None)
    return online.prompt_lengths(rows, trainer.processing_class, processes=processes, **options).longer


def is_ppo(trainer: Any) -> bool:
    """TRL's PPO makes its dataloader as it is built, and evaluates nothing."""
    return hasattr(trainer, "value_model")


def _trained_tokens(tokens: int, trainer: Any) -> int:
    """DPO cuts its rows only as it makes a batch (``trl/trainer/dpo_trainer.py: DataCollatorForPreference``)."""
    limit: int | None = getattr(trainer.args, "max_length", None)
    return tokens if limit is None else min(tokens, limit)


def _rows_at_once(trainer: Any) -> int:
    """Rows of a micro-batch; where completions are sampled, the prompts of a generation."""
    arguments = trainer.args
    if is_ppo(trainer):
        return int(trainer.local_dataloader_batch_size)
    if hasattr(trainer, "_generate_and_score_completions"):
        return max(1, int(arguments.generation_batch_size) // int(trainer.num_generations))
    return int(arguments.per_device_train_batch_size)


def _give_rows(trainer: Any, rows: Any) -> None:
    """Have it train on these rows in their order, whatever the config says of it."""
    trainer.train_dataset = rows
    if hasattr(trainer, "shuffle_dataset"):  # GRPO and RLOO: a sampler of their own, which repeats each prompt
        trainer.shuffle_dataset = False
        return
    from torch.utils.data import SequentialSampler

    trainer._get_train_sampler = lambda *_: SequentialSampler(rows)


def _give_rollout(trainer: Any, rows: Any) -> None:
    """Make all the data one batch, so that every rollout has all of these prompts; TRL shuffles them
    (``trl/experimental/ppo/ppo_trainer.py: __init__``, of which this is the dataloader)."""
    from torch.utils.data import DataLoader

    loader = DataLoader(rows, batch_size=len(rows), shuffle=True, collate_fn=trainer._collate, drop_last=True)
    trainer.train_dataset, trainer.dataloader = rows, trainer.accelerator.prepare(loader)


def _take_evaluated(trainer: Any) -> None:
    """Leave two batches to evaluate: the second meets what the first left behind."""
    group = getattr(trainer, "num_generations_eval", None) or 1
    rows = max(1, trainer.args.per_device_eval_batch_size * EVALUATED_BATCHES // group)
    batch = max(1, rows // EVALUATED_BATCHES)
    lengths = _lengths(trainer.eval_dataset, trainer)
    chosen = repeated(longest_rows(lengths, batch), batch)
    trainer.eval_dataset = trainer.eval_dataset.select((chosen * EVALUATED_BATCHES)[:rows])
