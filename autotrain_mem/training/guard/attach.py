"""Attaches the guard: when the device is out of memory, a step is repeated in parts that give the same gradient."""

from typing import Any

from transformers import TrainerCallback

from autotrain_mem.settings.optimizer_verdicts import optimizer_of
from autotrain_mem.training.guard.context import GuardContext, OnIncident, OnNotice
from autotrain_mem.training.guard.generation_split import Generation, Scoring
from autotrain_mem.training.guard.loss_weights import why_not_exact
from autotrain_mem.training.guard.micro_step import Evaluation, MicroSteps
from autotrain_mem.training.guard.ranks import Ranks, ranks_of, shares_by_ddp
from autotrain_mem.types import LearnedLimits

GROW_AFTER = 50
"""The limit is doubled after this many optimizer steps without running out of memory. If the doubled limit fails, this
costs one micro-step: at most 2 % of the time at first, and half as much after each failure."""


def attach_guard(
    trainer: Any,
    *,
    learned: LearnedLimits,
    on_incident: OnIncident,
    grow_after: int = GROW_AFTER,
    on_notice: OnNotice = lambda message: None,
) -> "Guard":
    """Guards one trainer, not its class. Call it after building the trainer, before ``train()``.

    The guard covers micro-steps, evaluation steps, and the generation and scoring of completions. Gradient clipping,
    the optimizer's step and a reward model's forward cannot be made smaller. Steps are split if the loss is a weighted
    sum of the parts' losses (not KTO's, ORPO's or a custom loss), else repeated whole; PPO's are not even repeated.
    ``learned``: the limits that an earlier run of the same plan learned, in addition to those in a checkpoint.
    ``grow_after``: the limits are doubled after this many optimizer steps without running out of memory."""
    why_not = why_no_guard(trainer)
    ranks = Ranks(trainer.accelerator) if why_not else ranks_of(trainer)
    context = GuardContext(trainer, learned, on_incident, grow_after, why_not, on_notice, ranks)
    if not hasattr(trainer, "value_model"):
        Evaluation(context, MicroSteps(context))
    if hasattr(trainer, "_generate_and_score_completions"):
        Generation(context, trainer.accelerator.unwrap_model(trainer.model))
        if hasattr(trainer, "_get_per_token_logps_and_entropies"):  # distillation scores nothing
            Scoring(context)
    guard = Guard(context)
    trainer.add_callback(guard)
    return guard


class Guard(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
    """The guard's trainer callback. See :func:`attach_guard`."""

    def __init__(self, context: GuardContext) -> None:
        self.context = context

    @property
    def learned(self) -> LearnedLimits:
        return self.context.learned

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restores the limits from the checkpoint when a run resumes."""
        self.context.restore(state)
        self.context.save()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts a step. After ``grow_after`` steps without an out-of-memory error, the limits are doubled."""
        self.context.step_ended()
        self.context.save_of_all()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Removes the gradient hooks from the model."""
        self.context.gradients.release()

    def leave(self) -> LearnedLimits:
        """Removes the gradient hooks, and drops the context, which references the trainer, so that the trainer's memory
        does not wait for Python's garbage collection. The methods replaced on the trainer and the model stay."""
        learned = self.learned
        self.context.gradients.release()
        del self.context
        return learned


def why_no_guard(trainer: Any) -> str | None:
    """Returns why the guard cannot handle out-of-memory errors in this process; None if it can."""
    args = trainer.args
    if hasattr(trainer, "value_model"):
        return "TRL's PPO runs its own training loop, in which a step cannot be repeated"
    if args.n_gpu > 1:
        return f"{args.n_gpu} GPUs train in one process (DataParallel)"
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed keeps its own gradients"
    if trainer.is_fsdp_enabled:
        return "FSDP gathers weights in every forward and backward, in which all ranks must take part"
    optimizer = optimizer_of(args)
    if "lomo" in optimizer or "layerwise" in optimizer:  # ``transformers/training_args.py: OptimizerNames``
        return f"--optim {optimizer} steps within the backward pass"
    if trainer.accelerator.num_processes < 2:
        return None
    if not shares_by_ddp(trainer.accelerator):
        kind = trainer.accelerator.distributed_type.value
        return f"it is unknown how {trainer.args.world_size} processes share the model ({kind})"
    if args.ddp_static_graph:
        return "--ddp_static_graph counts every backward pass"
    why_not = why_not_exact(trainer)
    return why_not and f"{why_not}, and the loss may depend on rows of other ranks"
