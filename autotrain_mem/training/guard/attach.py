"""A training that goes on when the device is full: with less at once, and the same mathematics.

::

    guard = attach_guard(trainer, learned=Learned(), told=lambda incident, learned: print(incident.remedy))
    trainer.train()

Where a shortage cannot be met without another gradient, a torch.OutOfMemoryError says why, and only a new start with a
smaller micro-batch helps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from transformers import TrainerCallback

from autotrain_mem.spec import Incident, Learned, Phase
from autotrain_mem.training.guard.backoff import Limit
from autotrain_mem.training.guard.evaluation import Evaluation
from autotrain_mem.training.guard.generation import Generation, RewardModel, Scoring
from autotrain_mem.training.guard.micro_step import MicroSteps
from autotrain_mem.training.guard.optimizer import OptimizerSteps
from autotrain_mem.training.out_of_memory import Full

if TYPE_CHECKING:
    from autotrain_mem.training.guard.ppo.guard import PpoGuard

Told = Callable[[Incident, Learned], None]

GROW_AFTER = 50
"""Optimizer steps without a shortage after which twice as much is tried at once. A failed try costs one micro-step: at
most 2 % of the time where it fails whenever it is tried, and less each time."""

KEPT_AS = "autofit_guard"
"""In ``trainer_state.json``, under ``stateful_callbacks``. No class is called so: what is kept under the name of a
callback's class, transformers makes anew from its state alone with ``--restore_callback_states_from_checkpoint``
(``transformers/trainer.py: _load_callback_state``), and a guard needs its trainer."""

LAYERWISE = ("lomo", "layerwise")
"""Optimizers that step within the backward pass (``transformers/training_args.py: OptimizerNames``)."""


def attach_guard(trainer: Any, *, learned: Learned, told: Told, grow_after: int = GROW_AFTER) -> Guard | PpoGuard:
    """Guard one trainer from now on; its class is left alone. Call it after building the trainer, before ``train()``.

    Args:
        trainer: Of transformers. SFT, Reward, DPO, GRPO and RLOO of TRL are split; others are repeated at most.
        learned: What an earlier run of the same plan found out. What a checkpoint holds counts as well.
        told: Is called after each shortage that was met.
        grow_after: Optimizer steps without a shortage after which more is tried at once.
    """
    if hasattr(trainer, "value_model"):
        from autotrain_mem.training.guard.ppo.guard import attach_ppo_guard

        return attach_ppo_guard(trainer, learned=learned, told=told, grow_after=grow_after)
    guard = Guard(trainer, learned, told, grow_after)
    trainer.add_callback(guard)
    return guard


class Guard(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Holds what was learned. See :func:`attach_guard`."""

    def __init__(self, trainer: Any, learned: Learned, told: Told, grow_after: int = GROW_AFTER) -> None:
        self.trainer = trainer
        self.why_not = why_no_guard(trainer)
        self._told = told
        self._micro_steps = MicroSteps(
            self, Limit(learned.train_tokens, grow_after), on_host=learned.activations_on_host
        )
        self._evaluation = Evaluation(self, self._micro_steps, Limit(learned.evaluate_tokens, grow_after))
        self._generation: Generation | None = None
        self._scoring: Scoring | None = None
        if hasattr(trainer, "_generate_and_score_completions"):
            policy = trainer.accelerator.unwrap_model(trainer.model)
            self._generation = Generation(self, policy, Limit(learned.generate_rows, grow_after))
            self._scoring = Scoring(self, Limit(learned.score_rows, grow_after))
            self._follow_reward_models()
        self._optimizer_steps = OptimizerSteps(self)

    def _follow_reward_models(self) -> None:
        import torch

        for model in self.trainer.reward_funcs:
            if isinstance(model, torch.nn.Module):
                RewardModel(self, model)

    @property
    def learned(self) -> Learned:
        """As of now."""
        return Learned(
            train_tokens=self._micro_steps.limit.most,
            evaluate_tokens=self._evaluation.limit.most,
            generate_rows=None if self._generation is None else self._generation.limit.most,
            score_rows=None if self._scoring is None else self._scoring.limit.most,
            activations_on_host=self._micro_steps.on_host,
        )

    # -- for its parts ---------------------------------------------------------------------------------------------

    def tell(
        self, phase: Phase, remedy: str, full: Full, *, rows: int | None = None, tokens: int | None = None
    ) -> None:
        """A shortage was met."""
        step = self.trainer.state.global_step
        incident = Incident(step=step, phase=phase, rows=rows, tokens=tokens, remedy=remedy, message=full.message)
        self._keep()
        self._told(incident, self.learned)

    def give_up(self, phase: Phase, full: Full, reason: str) -> NoReturn:
        """Nothing can be done about it here.

        Raises:
            torch.OutOfMemoryError: always, whichever library was out of memory.
        """
        import torch

        where = phase.value.replace("_", " ")
        raise torch.OutOfMemoryError(
            f"{full.message}\nNot repeated in smaller parts ({where}): {reason}."
        ) from full.error

    # -- as a callback ---------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A resumed run starts with what the one before had learned."""
        saved = state.stateful_callbacks.get(KEPT_AS)
        if isinstance(saved, dict):
            self._learn(Learned.from_json(saved["learned"]))
        self._keep()

    def _keep(self) -> None:
        """For ``trainer_state.json``."""
        self.trainer.state.stateful_callbacks[KEPT_AS] = {"learned": self.learned.to_json()}

    def _learn(self, saved: Learned) -> None:
        limits = [(self._micro_steps.limit, saved.train_tokens), (self._evaluation.limit, saved.evaluate_tokens)]
        if self._generation is not None and self._scoring is not None:
            limits += [(self._generation.limit, saved.generate_rows), (self._scoring.limit, saved.score_rows)]
        for limit, most in limits:
            limit.tighten(most)
        self._micro_steps.on_host |= saved.activations_on_host

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer is made when training begins, and wrapped after that."""
        self._optimizer_steps.follow(self.trainer.optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After enough clean steps more is tried at once."""
        for limit in self._limits():
            limit.step_ended()
        if self._micro_steps.limit.most is None:
            self._micro_steps.on_host = False
        self._keep()

    def _limits(self) -> list[Limit]:
        parts = (self._micro_steps, self._evaluation, self._generation, self._scoring)
        return [part.limit for part in parts if part is not None]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is the user's again."""
        self._micro_steps.gradients.release()

    def leave(self) -> Learned:
        """The optimizer is the user's again too, however the training ended; methods of trainer and model are not.

        Its parts, which hold the trainer, are let go: whoever drops the trainer then has its memory back at once, and
        not when Python next looks for cycles.
        """
        learned = self.learned
        self._micro_steps.gradients.release()
        self._optimizer_steps.leave()
        del self._micro_steps, self._evaluation, self._generation, self._scoring, self._optimizer_steps
        return learned


def why_no_guard(trainer: Any) -> str | None:
    """Why a shortage cannot be met in this process; None where it can."""
    args = trainer.args
    if args.world_size > 1:
        return f"{args.world_size} processes train together, and the others would wait for this one for ever"
    if args.n_gpu > 1:
        return f"{args.n_gpu} GPUs train in one process (DataParallel)"
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed keeps gradients of its own"
    if trainer.is_fsdp_enabled:
        return "FSDP keeps gradients of its own"
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(word in optimizer for word in LAYERWISE):
        return f"--optim {optimizer} steps within the backward pass"
    return None
