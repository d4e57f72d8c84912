"""Keeps a PPO run going when the device is full: what was too large at once is done again in parts.

A rollout is in :mod:`rollout`, a micro-batch in :mod:`update`. What cannot be done again ends the run:

- the statistics that TRL makes of all logits after a step;
- in several processes, a forward or a backward, in which all must take part;
- a backward of logits in half precision, unless parts were made already: the loss's graph is needed twice, and keeping
  it would cost memory there;
- a backward that reentrant checkpointing makes in stretches;
- an optimizer's step or a clipping that had begun to write.
"""

from __future__ import annotations

from autotrain_mem.training.guard.context import GuardContext
from autotrain_mem.training.guard.optimizer import OptimizerSteps
from autotrain_mem.training.guard.ppo.batches import Batches
from autotrain_mem.training.guard.ppo.rollout import Rollouts
from autotrain_mem.training.guard.ppo.update import MicroBatches


def guard_ppo(context: GuardContext) -> OptimizerSteps:
    """Have a PPO trainer do in parts what its device refuses; only this object is changed, never its class."""
    context.save()  # a resumed run takes from its checkpoint only what its own state names
    trainer, batches, optimizer_steps = context.trainer, Batches(context), OptimizerSteps(context)
    Rollouts(batches)
    if trainer.accelerator.num_processes > 1:
        return optimizer_steps
    MicroBatches(batches)
    # Within accelerate's step, which our trainer clips before: to clip is to write.
    optimizer_steps.follow(trainer.optimizer.optimizer)
    # What the schedule looks for (``torch/optim/lr_scheduler.py: LRScheduler.step``) is there, one function below.
    trainer.optimizer.optimizer.step._wrapped_by_lr_sched = True
    optimizer_steps.follow_clipping(trainer.accelerator, "clip_grad_norm_", lambda parameters: parameters)
    return optimizer_steps
