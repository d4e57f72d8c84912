"""Runs PPO's longest prompts once through an update, answered in full length, before TRL's loop begins its first.

Everything but the optimizer's step is done as TRL's loop does it (``trl/experimental/ppo/ppo_trainer.py: train``), by
the same methods of the trainer, guarded or not. Nothing of it stays: see :mod:`restore`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, TrainerCallback
from trl.models.utils import unwrap_model_for_generation

from autotrain_mem.methods.row_lengths import list_lengths
from autotrain_mem.training.longest_batch.restore import untouched, with_memory_of_later_steps
from autotrain_mem.training.longest_batch.rows import LongestBatch, OnError, longest_rows, repeated


class LongestPpoBatchFirst(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Runs the longest prompts when training begins, with a checkpoint's weights where it goes on from one.

    An out-of-memory error of it passes through. A guard is attached before this.
    """

    def __init__(self, trainer: Any, on_result: Callable[[LongestBatch], None], on_error: OnError | None) -> None:
        self._trainer, self._on_result, self._on_error = trainer, on_result, on_error

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """TRL's loop has its models in training mode, and nothing drawn yet."""
        self._on_result(run_longest_ppo_batch(self._trainer, self._on_error))


def run_longest_ppo_batch(trainer: Any, on_error: OnError | None = None) -> LongestBatch:
    """One rollout of the longest prompts, and a micro-batch of it forward and backward; everything is put back."""
    dataset, count = trainer.train_dataset, trainer.args.local_batch_size
    if "input_ids" not in (getattr(dataset, "column_names", None) or ()) or not hasattr(dataset, "__len__"):
        return LongestBatch(why_not="the training data have no column input_ids whose lengths are known beforehand")
    started = time.perf_counter()
    lengths = list_lengths(dataset, "input_ids")
    longest = repeated(longest_rows(lengths, count, padded=True), count)
    with untouched(trainer):
        queries = trainer._collate([dataset[number] for number in longest])["input_ids"]
        queries = queries.to(trainer.accelerator.device)
        with with_memory_of_later_steps(trainer, on_error):
            rows, logits = _rollout(trainer, queries)
            _micro_batches(trainer, rows, queries.shape[1])
        del queries, rows, logits  # TRL's loop holds the logits of all steps until the update is done
    return LongestBatch(rows=count, longest_tokens=lengths[longest[0]], seconds=time.perf_counter() - started)


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch is untyped to mypy here
def _rollout(trainer: Any, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give prompts with their completions, as long as they may be and judged, and the logits that these were drawn
    from."""
    args, pad = trainer.args, trainer.processing_class.pad_token_id
    at_once, length = args.local_rollout_forward_batch_size, args.response_length
    sampling = {"temperature": args.temperature + 1e-7, "top_k": 0.0, "top_p": 1.0, "do_sample": True}
    options = {**sampling, "max_new_tokens": length, "min_new_tokens": length}
    with unwrap_model_for_generation(trainer.model, trainer.accelerator, generation_kwargs=options) as model:
        config = GenerationConfig(**options)
        rows, logits = trainer._generate_rollout(model.policy, queries, at_once, pad, config)
    for start in range(0, len(rows), at_once):
        part = slice(start, start + at_once)
        _score(trainer, rows[part], logits[part], queries.shape[1])
    return rows, logits


def _score(trainer: Any, rows: torch.Tensor, logits: torch.Tensor, context: int) -> None:
    """Log-probabilities, the reference's, values, rewards."""
    pad, responses = trainer.processing_class.pad_token_id, rows[:, context:]
    trainer._log_probabilities(logits, responses)
    with trainer.null_ref_context() if trainer.ref_model is None else nullcontext():
        reference = trainer._forward(trainer.ref_model or trainer.model.policy, rows, pad)
    trainer._log_probabilities(_answers(reference.logits, context, trainer.args.temperature), responses)
    del reference
    trainer._judge(trainer.accelerator.unwrap_model(trainer.model).value_model, rows, pad, context)
    trainer._judge(trainer.reward_model, rows, pad, context)


def _micro_batches(trainer: Any, rows: torch.Tensor, context: int) -> None:
    """Forward, a loss of PPO's shape, backward, and the statistics that TRL makes of the logits.

    Twice, where a mini-batch has as many: as in TRL's loop, each name holds what it stood for until it is made anew.
    """
    args, pad = trainer.args, trainer.processing_class.pad_token_id
    rows = rows[: args.per_device_train_batch_size]
    for _ in range(min(2, args.local_mini_batch_size // args.per_device_train_batch_size)):
        output, values = trainer._forward(trainer.model, rows, pad)
        logits = _answers(output.logits, context, args.temperature)
        log_probabilities = trainer._log_probabilities(logits, rows[:, context:])
        ratio = torch.exp(log_probabilities - log_probabilities.detach())
        wrong = torch.square(values[:, context - 1 : -1].squeeze(-1))
        trainer.accelerator.backward(ratio.mean() + 0.5 * args.vf_coef * wrong.mean())
        with torch.no_grad():
            likely = torch.nn.functional.softmax(logits, dim=-1)
            _entropy = torch.logsumexp(logits, dim=-1) - torch.sum(likely * logits, dim=-1)


def _answers(logits: torch.Tensor, context: int, temperature: float) -> torch.Tensor:
    """Those that the completion's tokens were drawn from, divided in place."""
    logits = logits[:, context - 1 : -1]
    logits /= temperature + 1e-7
    return logits
