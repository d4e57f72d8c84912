"""One rehearsal, from a job and its knobs to a trace: the method's trainer, on its worst batch, on the stage."""

from __future__ import annotations

from typing import Any

from autotrain_mem.rehearsal.configs import (
    REHEARSED_ACCUMULATION,
    REHEARSED_STEPS,
    Configs,
    rehearsal_arguments,
)
from autotrain_mem.rehearsal.methods.method import method_of
from autotrain_mem.rehearsal.stage import Play, rehearse_play
from autotrain_mem.rehearsal.tokens import stub_tokenizer
from autotrain_mem.rehearsal.unrehearsed import not_counted
from autotrain_mem.spec import Job, Knobs, Trace

EVALUATED_BATCHES = 2
"""Batches of a rehearsed evaluation: the second meets what the first left behind."""


def rehearse(
    job: Job, knobs: Knobs, length: int, output_dir: str, compute_capability: tuple[int, int] = (8, 0)
) -> Trace:
    """Rehearse one configuration.

    Args:
        length: Tokens that every row of the worst batch fills; of the prompt alone, in online methods.
        output_dir: A scratch folder; nothing of worth is written there.
        compute_capability: Of the card, since kernels differ by it.
    """
    play = make_play(job, knobs, length, output_dir)
    return rehearse_play(play, compute_capability, not_counted(job, knobs))


def make_play(job: Job, knobs: Knobs, length: int, output_dir: str) -> Play:
    """Everything that the stage needs; the same play can be given with real weights, for comparison."""
    method = method_of(job.method)
    arguments = rehearsal_arguments(job, knobs, output_dir)
    filled = method.configs({**arguments, **method.rehearsal_changes(dict(job.arguments), knobs)})
    rows = method.worst_rows(filled, length, _trained_rows(knobs))
    evaluated = method.worst_rows(filled, length, _evaluated_rows(filled, knobs)) if filled.is_evaluated else None
    tokenizer = stub_tokenizer("left" if job.is_online else "right")
    return Play(
        build=lambda: build_trainer(job, knobs, filled, rows, evaluated, tokenizer),
        edit_rows=method.rows_editor(filled),
        directions=lambda trainer: method.stage_directions(trainer, filled, knobs),
    )


def build_trainer(
    job: Job, knobs: Knobs, filled: Configs, train_dataset: Any, eval_dataset: Any, stub: Any = None
) -> Any:
    """The method's trainer, with what TRL cannot do itself: for a rehearsal and for the real run.

    Args:
        stub: The tokenizer of a rehearsal; None in a real run.
    """
    from autotrain_mem.trainers.host_optimizer import offload_to_host

    trainer = method_of(job.method).build_trainer(filled, job.model, train_dataset, eval_dataset, stub=stub)
    if knobs.optimizer_offload:
        offload_to_host(trainer)
    return trainer


def _trained_rows(knobs: Knobs) -> int:
    """Enough for every micro-step; where a generation makes the batch, for every generation."""
    if knobs.completion_length:
        return knobs.effective_batch_size * REHEARSED_STEPS
    return knobs.per_device_train_batch_size * REHEARSED_ACCUMULATION * REHEARSED_STEPS


def _evaluated_rows(filled: Configs, knobs: Knobs) -> int:
    """Enough for every batch of an evaluation; where completions are evaluated, a prompt makes a group of them."""
    group = getattr(filled.training, "num_generations_eval", None) or knobs.num_generations or 1
    rows: int = filled.training.per_device_eval_batch_size * EVALUATED_BATCHES
    return max(1, rows // group)
