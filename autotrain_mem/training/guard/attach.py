"""Keeps a training going when the device is full: with less at once, and the same mathematics.

::

    guard = attach_guard(trainer, learned=Learned(), on_incident=lambda incident, learned: print(incident.remedy))
    trainer.train()

Where a shortage cannot be met without another gradient, a torch.OutOfMemoryError says why, and only a new start with a
smaller micro-batch helps.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from autotrain_mem.training.guard.context import GuardContext, OnIncident, OnNotice
from autotrain_mem.training.guard.evaluation import Evaluation
from autotrain_mem.training.guard.generation_split import Generation, Scoring, guard_reward_model
from autotrain_mem.training.guard.loss_weights import why_not_exact
from autotrain_mem.training.guard.micro_step import MicroSteps
from autotrain_mem.training.guard.optimizer import OptimizerSteps
from autotrain_mem.training.guard.ranks import Ranks, ranks_of, shares_by_ddp
from autotrain_mem.types import Learned

GROW_AFTER = 50
"""Optimizer steps without a shortage after which twice as much is tried at once. A failed try costs one micro-step: at
most 2 % of the time where it fails whenever it is tried, and less each time."""


def attach_guard(
    trainer: Any,
    *,
    learned: Learned,
    on_incident: OnIncident,
    grow_after: int = GROW_AFTER,
    on_notice: OnNotice = lambda message: None,
) -> Guard:
    """Guard one trainer from now on; its class is left alone. Call it after building the trainer, before ``train()``.

    Call it also before anything else replaces the ``backward`` of PPO's accelerator, so that a repetition counts as
    part of it.

    Args:
        trainer: Of transformers. SFT, Reward, DPO, GRPO, RLOO, Distillation and PPO of TRL are split; others are
            repeated at most.
        learned: What an earlier run of the same plan found out. What a checkpoint holds counts as well.
        on_incident: Is called after each shortage that was met.
        grow_after: Optimizer steps without a shortage after which more is tried at once.
        on_notice: Is called with what a user has to know of how micro-batches and their parts are put together.
    """
    is_ppo = hasattr(trainer, "value_model")
    why_not = None if is_ppo else why_no_guard(trainer)
    ranks = Ranks(trainer.accelerator) if why_not else ranks_of(trainer)
    context = GuardContext(trainer, learned, on_incident, grow_after, why_not, on_notice, ranks)
    guard = Guard(context, _guard_ppo(context) if is_ppo else _guard_methods(context))
    trainer.add_callback(guard)
    return guard


def _guard_methods(context: GuardContext) -> OptimizerSteps:
    """Replace the methods in which one of TRL's trainers other than PPO's takes memory."""
    trainer = context.trainer
    Evaluation(context, MicroSteps(context))
    if hasattr(trainer, "_generate_and_score_completions"):
        Generation(context, trainer.accelerator.unwrap_model(trainer.model))
        if hasattr(trainer, "_get_per_token_logps_and_entropies"):  # distillation scores nothing
            Scoring(context)
        for model in getattr(trainer, "reward_funcs", ()):
            if isinstance(model, torch.nn.Module):
                guard_reward_model(context, model)
    optimizer_steps = OptimizerSteps(context)
    if hasattr(trainer, "_clip_grad_norm"):
        optimizer_steps.follow_clipping(trainer, "_clip_grad_norm", lambda model: model.parameters())
    return optimizer_steps


def _guard_ppo(context: GuardContext) -> OptimizerSteps:
    """Have a PPO trainer do in parts what its device refuses; only this object is changed, never its class.

    What cannot be done again ends the run: the statistics that TRL makes of all logits after a step; a backward of
    logits in half precision, unless parts were made already (the loss's graph is needed twice, and keeping it would
    cost memory there); a backward that reentrant checkpointing makes in stretches; an optimizer's step or a clipping
    that had begun to write; in several processes that are not DDP's, a forward or a backward.
    """
    from autotrain_mem.training.guard.ppo_rollout import Rollouts
    from autotrain_mem.training.guard.ppo_update import MicroBatches

    context.save()  # a resumed run takes from its checkpoint only what its own state names
    trainer, optimizer_steps = context.trainer, OptimizerSteps(context)
    Rollouts(context)
    if trainer.accelerator.num_processes > 1 and not shares_by_ddp(trainer.accelerator):
        return optimizer_steps
    MicroBatches(context)
    # Within accelerate's step, which our trainer clips before: to clip is to write.
    optimizer_steps.follow(trainer.optimizer.optimizer)
    # What the schedule looks for (``torch/optim/lr_scheduler.py: LRScheduler.step``) is there, one function below.
    trainer.optimizer.optimizer.step._wrapped_by_lr_sched = True
    optimizer_steps.follow_clipping(trainer.accelerator, "clip_grad_norm_", lambda parameters: parameters)
    return optimizer_steps


class Guard(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Follows the trainer's events for a guard. See :func:`attach_guard`."""

    def __init__(self, context: GuardContext, optimizer_steps: OptimizerSteps) -> None:
        self.context = context
        self._optimizer_steps = optimizer_steps

    @property
    def learned(self) -> Learned:
        return self.context.learned

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A resumed run starts with what the one before had learned."""
        self.context.restore(state)
        self.context.save()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer is built when training begins, and wrapped after that. TRL's PPO has no such event."""
        self._optimizer_steps.follow(self.context.trainer.optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After enough clean steps more is tried at once."""
        self.context.step_ended()
        self.context.save_of_all()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is the user's again."""
        self.context.gradients.release()

    def leave(self) -> Learned:
        """Give the optimizer back to the user too, however the training ended; methods of trainer and model stay.

        Its parts, which hold the trainer, are let go: whoever drops the trainer then has its memory back at once, and
        not when Python next looks for cycles.
        """
        learned = self.learned
        self.context.gradients.release()
        self._optimizer_steps.leave()
        del self.context, self._optimizer_steps
        return learned


def why_no_guard(trainer: Any) -> str | None:
    """Say why a shortage cannot be met in this process; None where it can."""
    args = trainer.args
    if args.n_gpu > 1:
        return f"{args.n_gpu} GPUs train in one process (DataParallel)"
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed keeps gradients of its own"
    if trainer.is_fsdp_enabled:
        return "FSDP gathers weights in every forward and backward, in which all ranks must take part"
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:  # ``transformers/training_args.py: OptimizerNames``
        return f"--optim {optimizer} steps within the backward pass"
    return _why_not_under_ddp(trainer) if trainer.accelerator.num_processes > 1 else None


def _why_not_under_ddp(trainer: Any) -> str | None:
    """Say why one rank cannot repeat its part of a micro-step alone; None where it can."""
    if not shares_by_ddp(trainer.accelerator):
        kind = trainer.accelerator.distributed_type.value
        return f"how {trainer.args.world_size} processes share the model ({kind}) is not known"
    if trainer.args.ddp_static_graph:
        return "--ddp_static_graph counts every backward pass"
    why_not = why_not_exact(trainer)
    return why_not and f"{why_not}, and other ranks' rows may count in it"
