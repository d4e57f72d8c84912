"""Keeps a PPO run going when the device is full: what was too large at once is done again in parts.

A rollout is in :mod:`guard_ppo_rollout`, a micro-batch in :mod:`guard_ppo_step`. What cannot be done again, and passes:

- the statistics that TRL makes of all logits after a step;
- in several processes, a forward or a backward, in which all must take part;
- a backward of logits in half precision, unless parts were made already: the loss's graph is needed twice, and keeping
  it would cost memory there;
- a backward that reentrant checkpointing makes in stretches;
- an optimizer's step or a clipping that had begun to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
from transformers.trainer_callback import ExportableState, TrainerCallback

from autotrain_mem.spec import Incident, Learned, Phase
from autotrain_mem.training.guard.backoff import Limit
from autotrain_mem.training.guard.generation import REPEATED
from autotrain_mem.training.guard.gradients import Gradients
from autotrain_mem.training.guard.optimizer import HALF_CLIPPED, OptimizerSteps, clips_only_once
from autotrain_mem.training.guard.ppo.rollout import Rollouts
from autotrain_mem.training.guard.ppo.update import MicroBatches
from autotrain_mem.training.out_of_memory import Full, attempt

Told = Callable[[Incident, Learned], None]
Limited = Literal["train_tokens", "generate_rows", "score_rows"]
Rows = range
Held = Sequence[torch.Tensor]
"""Parameters whose gradients hold the rows already."""
Work = Callable[[slice, Held], None]


def attach_ppo_guard(trainer: Any, *, learned: Learned, told: Told, grow_after: int) -> PpoGuard:
    """From now on the trainer does in parts what its device refuses; only this object is changed, never its class.

    Call it before anything else stands in the accelerator's ``backward``, so that a repetition counts as part of it.

    Args:
        learned: What earlier runs taught.
        told: Called after each refusal, with what is known from then on.
        grow_after: Updates without a refusal after which parts are made twice as large.
    """
    guard = PpoGuard(trainer, learned, told, grow_after)
    trainer.add_callback(guard)
    trainer.state.stateful_callbacks[type(guard).__name__] = guard.state()
    return guard


class PpoGuard(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Holds what was learned. See :func:`attach_ppo_guard`."""

    def __init__(self, trainer: Any, learned: Learned, told: Told, grow_after: int) -> None:
        names: tuple[Limited, ...] = ("train_tokens", "generate_rows", "score_rows")
        self.trainer = trainer
        self.gradients = Gradients()
        self.limits = {name: Limit(getattr(learned, name), grow_after) for name in names}
        self.on_host = learned.activations_on_host
        self.why_not: str | None = None
        self._given, self._told = learned, told
        Rollouts(self)
        if trainer.accelerator.num_processes == 1:
            self.gradients.follow(trainer.model)
            MicroBatches(self)
            self._guard_steps()

    def _guard_steps(self) -> None:
        accelerator, optimizer = self.trainer.accelerator, self.trainer.optimizer
        self._accelerates_clip, accelerator.clip_grad_norm_ = accelerator.clip_grad_norm_, self._clip
        # Within accelerate's step, which our trainer clips before: to clip is to write.
        OptimizerSteps(self).follow(optimizer.optimizer)
        # What the schedule looks for (``torch/optim/lr_scheduler.py: LRScheduler.step``) is there, one function below.
        optimizer.optimizer.step._wrapped_by_lr_sched = True

    # -- what was learned ----------------------------------------------------------------------------------------------

    @property
    def learned(self) -> Learned:
        """As of now."""
        limits = {name: limit.most for name, limit in self.limits.items()}
        return replace(self._given, activations_on_host=self.on_host, **limits)

    def state(self) -> dict[str, Any]:
        """For ``trainer_state.json``."""
        return {"args": {}, "attributes": {"learned": self.learned.to_json()}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A resumed run starts with what the one before had learned."""
        saved = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(saved, dict):
            learned = Learned.from_json(saved["attributes"]["learned"])
            for name, limit in self.limits.items():
                limit.tighten(getattr(learned, name))
            self.on_host |= learned.activations_on_host

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After enough clean updates more is tried at once."""
        for limit in self.limits.values():
            limit.step_ended()
        if self.limits["train_tokens"].most is None:
            self.on_host = False

    def leave(self) -> Learned:
        """The model is the user's again; the trainer's and the optimizer's methods are not."""
        self.gradients.release()
        return self.learned

    # -- for its parts -------------------------------------------------------------------------------------------------

    def tell(
        self, phase: Phase, remedy: str, full: Full, *, rows: int | None = None, tokens: int | None = None
    ) -> None:
        """A shortage was met."""
        step = self.trainer.state.global_step
        told = Incident(step=step, phase=phase, rows=rows, tokens=tokens, remedy=remedy, message=full.message)
        self._told(told, self.learned)

    def give_up(self, phase: Phase, full: Full, reason: str) -> NoReturn:
        """Raises torch.OutOfMemoryError, whichever library was out of memory."""
        where = phase.value.replace("_", " ")
        raise torch.OutOfMemoryError(f"{full.message}\nNot repeated ({where}): {reason}.") from full.error

    def halve(self, name: Limited, phase: Phase, rows: int, length: int, full: Full) -> None:
        """Less at once from now on; raises torch.OutOfMemoryError where nothing is left to make smaller."""
        if phase is Phase.BACKWARD and self.gradients.come_in_parts:
            self.give_up(phase, full, "reentrant checkpointing gives gradients in parts")
        if rows == 1 and (self.on_host or name != "train_tokens"):
            self.give_up(phase, full, f"a single row of {length} tokens is too large")
        self.shrink(name, rows, length)
        if rows > 1:
            remedy = f"split into {(rows + 1) // 2} + {rows // 2} rows"
        else:
            self.on_host = True
            remedy = "repeated with what backward needs waiting on the host"
        self.tell(phase, remedy, full, rows=rows, tokens=rows * length)

    def shrink(self, name: Limited, rows: int, length: int) -> None:
        """From now on less than so many rows at once."""
        units, limit = _units(name, length), self.limits[name]
        limit.failed(rows * units)
        if rows > 1:
            limit.most = -(-(limit.most or 1) // units) * units  # whole rows: 5 are cut into 3 + 2, not 2 + 2 + 1

    def in_parts(self, name: Limited, phase: Phase, length: int, rows: Rows, work: Work, held: Held = ()) -> None:
        """All rows in their order, as many at once as may be; each part is done once, whatever was refused."""
        limit, units = self.limits[name], _units(name, length)
        parts = limit.parts(len(rows) * units, len(rows))
        if parts == 1:
            self.gradients.begin()
            full = attempt(lambda: work(slice(rows.start, rows.stop), held))
            if not isinstance(full, Full):
                limit.fitted(len(rows) * units)
                return
            self.halve(name, phase, len(rows), length, full)
            held, parts = (*held, *self.gradients.done()), min(2, len(rows))
        for part in _split(rows, parts):
            self.in_parts(name, phase, length, part, work, held)

    # -- the optimizer's step ------------------------------------------------------------------------------------------

    def _clip(self, parameters: Any, *args: Any, **options: Any) -> Any:
        """The norm's temporaries may be refused; what was scaled cannot be scaled again."""
        held = [parameter.grad for parameter in parameters if parameter.grad is not None]
        before = [gradient._version for gradient in held]
        norm = attempt(lambda: self._accelerates_clip(parameters, *args, **options))
        if not isinstance(norm, Full):
            return norm.value
        is_begun = [gradient._version for gradient in held] != before
        if is_begun or clips_only_once(self.trainer.accelerator):
            self.give_up(Phase.OPTIMIZER_STEP, norm, HALF_CLIPPED)
        self.tell(Phase.OPTIMIZER_STEP, REPEATED, norm)
        return self._accelerates_clip(parameters, *args, **options)


def _units(name: Limited, length: int) -> int:
    """What a row counts for."""
    return length if name == "train_tokens" else 1


def _split(rows: Rows, parts: int) -> Iterator[Rows]:
    """The larger ones first: 5 rows in 2 parts are 3 + 2."""
    size, longer = divmod(len(rows), parts)
    start = rows.start
    for number in range(parts):
        stop = start + size + (number < longer)
        yield range(start, stop)
        start = stop
