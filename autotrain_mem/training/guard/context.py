"""Holds what the parts of a guard share: the trainer, the limits, and how a shortage is reported or given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn

from autotrain_mem.spec import Incident, Learned, Phase, codec
from autotrain_mem.training.guard.backoff import Limit
from autotrain_mem.training.guard.gradients import Gradients
from autotrain_mem.training.out_of_memory import Full

OnIncident = Callable[[Incident, Learned], None]
"""Is called after each shortage that was met, with what is known from then on."""

LimitName = Literal["train_tokens", "evaluate_tokens", "generate_rows", "score_rows"]
LIMIT_NAMES: tuple[LimitName, ...] = ("train_tokens", "evaluate_tokens", "generate_rows", "score_rows")
"""Fields of :class:`Learned`. Tokens count padding."""

KEPT_AS = "autofit_guard"
"""In ``trainer_state.json``, under ``stateful_callbacks``. No class is called so: what is kept under the name of a
callback's class, transformers builds again from its state alone with ``--restore_callback_states_from_checkpoint``
(``transformers/trainer.py: _load_callback_state``), and a guard needs its trainer."""

REPEATED = "repeated after the cache was emptied"
ON_HOST = "repeated with what backward needs waiting on the host"


class GuardContext:
    """The state of one trainer's guard.

    Args:
        learned: What an earlier run of the same plan found out.
        grow_after: Optimizer steps without a shortage after which more is tried at once.
        why_not: Why nothing may be repeated in this process; None where it may.
    """

    def __init__(
        self, trainer: Any, learned: Learned, on_incident: OnIncident, grow_after: int, why_not: str | None = None
    ) -> None:
        self.trainer = trainer
        self.why_not = why_not
        self.limits = {name: Limit(getattr(learned, name), grow_after) for name in LIMIT_NAMES}
        self.on_host = learned.activations_on_host
        self.gradients = Gradients()
        self._on_incident = on_incident

    # -- what was learned ----------------------------------------------------------------------------------------------

    @property
    def learned(self) -> Learned:
        """As of now."""
        return Learned(activations_on_host=self.on_host, **{name: limit.most for name, limit in self.limits.items()})

    def save(self) -> None:
        """Write what was learned into the state that a checkpoint takes to ``trainer_state.json``."""
        self.trainer.state.stateful_callbacks[KEPT_AS] = {"learned": codec.to_json(self.learned)}

    def restore(self, state: Any) -> None:
        """Tighten the limits to those that :meth:`save` wrote into a trainer's state, if it did."""
        saved = state.stateful_callbacks.get(KEPT_AS)
        if isinstance(saved, dict):
            learned = codec.from_json(Learned, saved["learned"])
            for name, limit in self.limits.items():
                limit.tighten(getattr(learned, name))
            self.on_host |= learned.activations_on_host

    def step_ended(self) -> None:
        """Count an optimizer step: after enough clean ones more is tried at once."""
        for limit in self.limits.values():
            limit.step_ended()
        if self.limits["train_tokens"].most is None:
            self.on_host = False

    # -- what becomes of a shortage ------------------------------------------------------------------------------------

    def report(
        self, phase: Phase, remedy: str, full: Full, *, rows: int | None = None, tokens: int | None = None
    ) -> None:
        """Report a shortage that was met, and save what it taught."""
        step = self.trainer.state.global_step
        incident = Incident(step=step, phase=phase, rows=rows, tokens=tokens, remedy=remedy, message=full.message)
        self.save()
        self._on_incident(incident, self.learned)

    def give_up(self, phase: Phase, full: Full, reason: str) -> NoReturn:
        """End the run, since nothing can be done about a shortage in this process.

        Raises:
            torch.OutOfMemoryError: always, whichever library was out of memory.
        """
        import torch

        where = phase.value.replace("_", " ")
        raise torch.OutOfMemoryError(
            f"{full.message}\nNot repeated in smaller parts ({where}): {reason}."
        ) from full.error
