"""Reports the first step whose loss or gradient is not finite, which transformers' logs hide."""

import math
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from autotrain_mem.training.process.world import World
from autotrain_mem.training.task import SendEvent

LOGGED = ("loss", "grad_norm", "loss/policy_avg", "loss/value_avg")
"""The logged values that are checked: the first two are transformers', the others PPO's, which runs its own training
loop (``trl/experimental/ppo/ppo_trainer.py: train``)."""


class FiniteValues(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Sends one ``not_finite`` event: the step, its loss, its gradient norm, and whether the weights are spoilt.

    Spoilt weights are not saved: with ``save_total_limit`` they would replace a good checkpoint.

    transformers does not log such a loss (``trainer.py: _run_epoch``, ``logging_nan_inf_filter``), so the values
    themselves are checked. This adds no synchronization: a step's norm is read when the step is logged, or after the
    next loss. With fp16 the loss scaler handles infinite gradients, which are not checked.
    """

    def __init__(self, trainer: Any, send: SendEvent, world: World) -> None:
        self._trainer, self._send, self._world = trainer, send, world
        self._is_scaled = getattr(trainer.accelerator, "scaler", None) is not None
        self._loss = 0.0
        """This step's loss if it is not finite, else 0."""
        self._step: tuple[int, float, Any] | None = None
        """The last step not yet checked, with its loss and its norm."""
        self._is_told = self._is_spoilt = False
        self._training_step = trainer.training_step
        self._get_grad_norm = getattr(trainer, "_get_grad_norm", None)
        trainer.training_step = self.training_step
        if self._get_grad_norm is not None:
            trainer._get_grad_norm = self.get_grad_norm

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = self._training_step(*args, **kwargs)
        if not self._is_told:
            value = float(loss)
            self._look()
            if not math.isfinite(value):
                self._loss = value
        return loss

    def get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces ``Trainer._get_grad_norm``, which runs after the last micro-step of a step."""
        assert self._get_grad_norm is not None
        norm = self._get_grad_norm(*args, **kwargs)
        self._step = (self._trainer.state.global_step + 1, self._loss, None if self._is_scaled else norm)
        self._loss = 0.0
        return norm

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Checks a step before it is logged or saved, so that no spoilt checkpoint replaces a good one."""
        if control.should_log or control.should_save:
            self._look()
        if control.should_save:  # all ranks write a checkpoint, or none does
            self._is_spoilt = "spoilt" in self._world.gather("spoilt" if self._is_spoilt else "")
        if self._is_spoilt:
            control.should_save = False

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Checks the last step, which no other loss follows."""
        self._look()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Checks the logged values, for trainers whose steps cannot be observed."""
        names, logged = [name for name in LOGGED if not (self._is_scaled and name == "grad_norm")], logs or {}
        values = [float(logged[name]) for name in names if isinstance(logged.get(name), (int, float))]
        self._judge(state.global_step, next((value for value in values if not math.isfinite(value)), self._loss), None)

    def _look(self) -> None:
        if self._step is not None:
            step, loss, norm = self._step
            self._step = None
            self._judge(step, loss, None if norm is None else float(norm))

    def _judge(self, step: int, loss: float, norm: float | None) -> None:
        is_gradient = norm is not None and not math.isfinite(norm)
        if self._is_told or (math.isfinite(loss) and not is_gradient):
            return
        self._is_told, self._is_spoilt = True, is_gradient
        values = {"loss": _word(loss), "gradient": "unknown" if norm is None else _word(norm)}
        self._send({"event": "not_finite", "step": step, **values, "spoils": is_gradient or norm is None})


def _word(value: float) -> str:
    """Returns ``nan`` and ``inf`` as text, since JSON has neither."""
    return "finite" if math.isfinite(value) else str(value)
