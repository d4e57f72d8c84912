"""On-policy distillation with TRL's DistillationTrainer: a student answers and learns to match a teacher's output."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from autotrain_mem.methods import image_rows, online
from autotrain_mem.methods.configs import Configs, trainer_arguments
from autotrain_mem.methods.interface import Basis
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Knobs

liger_since = None


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """Builds the trainer with a teacher of the student's dtype and quantization, unless
    ``--teacher_model_init_kwargs`` gives others, as ``trl/scripts/distillation.py: main`` does."""
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
image_rows_editor = online.rows_editor


@contextmanager
def training_patches(trainer: Any, filled: Configs, knobs: Knobs) -> Iterator[None]:
    """Generates for all of the plan's micro-steps at the beginning of each optimizer step, as TRL does by
    ``gradient_accumulation_steps``, which a rehearsal reduces (trl/trainer/distillation_trainer.py:
    get_train_dataloader, _prepare_inputs)."""
    every = knobs.gradient_accumulation_steps
    for name in ("get_train_dataloader", "_prepare_inputs"):
        setattr(trainer, name, online.with_accumulation(every, getattr(trainer, name), trainer.args))
    trainer.add_callback(online.generating_each_step(trainer, every))
    yield


def micro_steps_per_generation(filled: Configs, knobs: Knobs) -> int:
    """Returns the number of micro-steps in an optimizer step."""
    return knobs.gradient_accumulation_steps


row_lengths = online.row_lengths
image_texts = online.image_texts


_LOADED_BY = frozenset({"dtype", "attn_implementation", "revision", "trust_remote_code"})
"""Keys of ``teacher_model_init_kwargs`` that a rehearsal supports; keys that place the model are not among them."""


def check(filled: Configs, *, to_train: bool) -> None:
    """Raises UsageError if the teacher is placed or quantized by its own settings."""
    given: Mapping[str, Any] = filled.training.teacher_model_init_kwargs or {}
    if others := sorted(given.keys() - _LOADED_BY):
        raise UsageError(
            f"--teacher_model_init_kwargs with {', '.join(others)} is not supported yet: a rehearsal does not know the "
            "teacher's place.",
            hint=f"It takes {', '.join(sorted(_LOADED_BY))}. --load_in_4bit quantizes student and teacher.",
        )


def loss_basis(trainer: Any, *, is_counted: bool) -> Basis:
    """Returns tokens: a generation's in training, else a batch's (``distillation_trainer.py: compute_loss``)."""
    return Basis.WHOLE if trainer.model.training else Basis.TOKENS
