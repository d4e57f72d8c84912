"""Adapts on-policy distillation with TRL's DistillationTrainer: a student answers and learns to match a teacher."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from autotrain_mem.methods import online
from autotrain_mem.methods.configs import Configs, trainer_arguments
from autotrain_mem.methods.interface import Basis
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Knobs

adapter_rate = (2e-4, "TRL's example with LoRA; tinker-cookbook has 1e-4")
"""``examples/scripts/distillation.py``; ``recipes/distillation/on_policy_distillation.py: learning_rate``."""
liger_since = None
base = online


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """Builds the trainer as ``trl/scripts/distillation.py: main`` does. The teacher gets the student's dtype and
    quantization unless ``--teacher_model_init_kwargs`` gives others."""
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


@contextmanager
def training_patches(trainer: Any, filled: Configs, knobs: Knobs) -> Iterator[None]:
    """Makes each optimizer step of a rehearsal begin with a generation for all micro-steps of the plan. TRL generates
    for ``gradient_accumulation_steps`` micro-steps, of which a rehearsal has fewer
    (trl/trainer/distillation_trainer.py: get_train_dataloader, _prepare_inputs)."""
    every = knobs.gradient_accumulation_steps
    for name in ("get_train_dataloader", "_prepare_inputs"):
        setattr(trainer, name, online.with_accumulation(every, getattr(trainer, name), trainer.args))
    trainer.add_callback(online.generating_each_step(trainer, every))
    yield


optimizer_steps = online.optimizer_steps


def micro_steps_per_generation(filled: Configs, knobs: Knobs) -> int:
    """Returns the number of micro-steps in an optimizer step of the plan."""
    return knobs.gradient_accumulation_steps


_LOADED_BY = frozenset({"dtype", "attn_implementation", "revision", "trust_remote_code"})
"""The keys of ``teacher_model_init_kwargs`` that a rehearsal supports. It supports none that place the model."""


def check(filled: Configs) -> None:
    """Raises UsageError if ``teacher_model_init_kwargs`` has keys that a rehearsal does not support."""
    given: Mapping[str, Any] = filled.training.teacher_model_init_kwargs or {}
    if others := sorted(given.keys() - _LOADED_BY):
        raise UsageError(
            f"--teacher_model_init_kwargs with {', '.join(others)} is not supported yet: a rehearsal cannot place or "
            "quantize the teacher separately.",
            hint=f"It takes {', '.join(sorted(_LOADED_BY))}. --load_in_4bit quantizes student and teacher.",
        )


def loss_basis(trainer: Any, *, is_counted: bool) -> Basis:
    """Returns what the loss is averaged over: in training all tokens of a generation, else a batch's tokens
    (``distillation_trainer.py: compute_loss``)."""
    return Basis.WHOLE if trainer.model.training else Basis.TOKENS
