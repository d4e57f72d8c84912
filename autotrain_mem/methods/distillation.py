"""On-policy distillation with TRL's DistillationTrainer: a student answers and learns to match a teacher's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from autotrain_mem.methods import image_rows, online
from autotrain_mem.methods.configs import Configs, trainer_arguments
from autotrain_mem.methods.interface import Basis
from autotrain_mem.methods.row_lengths import RowLengths
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Knobs

liger_since = None


def missing(given: Callable[[str], object], *, to_train: bool) -> UsageError | None:
    """Returns the error for a student without a teacher."""
    if given("teacher_model_name_or_path"):
        return None
    return UsageError(
        "No teacher is given: nothing says what the student is to learn.",
        hint="Give --teacher_model_name_or_path MODEL, a larger model with the student's vocabulary.",
    )


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """Builds the trainer with its teacher, loaded with the student's dtype and quantization.

    ``trl/scripts/distillation.py: main`` does the same; ``--teacher_model_init_kwargs`` overrides it.
    """
    import trl

    common = trainer_arguments(filled, model, stub)
    filled.training.teacher_model_init_kwargs = {
        **filled.training.model_init_kwargs,
        "revision": filled.training.teacher_model_revision,
        "quantization_config": common["quantization_config"],
        **(filled.training.teacher_model_init_kwargs or {}),
    }
    return trl.DistillationTrainer(
        teacher_model=filled.training.teacher_model_name_or_path,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        **common,
    )


worst_rows = online.worst_rows
rows_editor = online.rows_editor
worst_image_rows = image_rows.prompts
image_rows_editor = online.image_rows_editor


@contextmanager
def training_patches(trainer: Any, filled: Configs, knobs: Knobs) -> Iterator[None]:
    """Generates for all micro-steps of an optimizer step, although a rehearsal runs only a few of them.

    TRL generates for ``gradient_accumulation_steps`` micro-batches at once and takes them one by one
    (trl/trainer/distillation_trainer.py: get_train_dataloader, _prepare_inputs), but a rehearsal reduces that number.
    These two methods therefore get the plan's number, and each optimizer step begins with a generation.
    """
    every = knobs.gradient_accumulation_steps
    for name in ("get_train_dataloader", "_prepare_inputs"):
        setattr(trainer, name, online.with_accumulation(every, getattr(trainer, name), trainer.args))
    trainer.add_callback(online.generating_each_step(trainer, every))
    yield


def micro_steps_per_generation(filled: Configs, knobs: Knobs) -> int:
    """Returns the number of micro-steps in an optimizer step."""
    return knobs.gradient_accumulation_steps


def row_lengths(filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Counts the tokens of every prompt, including the chat template."""
    options = filled.training.chat_template_kwargs or {}
    tokenize = partial(online.prompt_ids, tokenizer=tokenizer, **options)
    return online.prompt_lengths(split, tokenize, processes=filled.training.dataset_num_proc)


image_texts = online.image_texts


_LOADED_BY = frozenset({"dtype", "attn_implementation", "revision", "trust_remote_code"})
"""Keys of ``teacher_model_init_kwargs`` that a rehearsal supports; keys that place the model are not among them."""


def check(filled: Configs, *, to_train: bool) -> None:
    """Raises UsageError if the teacher is placed or quantized by its own settings."""
    given: Mapping[str, Any] = filled.training.teacher_model_init_kwargs or {}
    if others := sorted(given.keys() - _LOADED_BY):
        raise UsageError(
            f"--teacher_model_init_kwargs with {', '.join(others)} is not supported yet: where the teacher lies is not "
            "known.",
            hint=f"It takes {', '.join(sorted(_LOADED_BY))}. --load_in_4bit quantizes student and teacher.",
        )


def loss_basis(trainer: Any, *, is_counted: bool) -> Basis:
    """Returns the basis, which is tokens: of a whole generation in training, of one batch in evaluation.

    ``trl/trainer/distillation_trainer.py: compute_loss``.
    """
    return Basis.WHOLE if trainer.model.training else Basis.TOKENS
