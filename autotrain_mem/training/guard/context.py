"""Holds what the guard's modules share: trainer, limits, finished gradients, and the reports of incidents."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from autotrain_mem.support import codec
from autotrain_mem.training.cuda_oom import RanOut
from autotrain_mem.training.guard.batch_split import image_token_of
from autotrain_mem.training.guard.ranks import Ranks
from autotrain_mem.types import Incident, LearnedLimits, Phase

OnIncident = Callable[[Incident, LearnedLimits], None]
"""Called with each out-of-memory error that the guard handles, and the limits learned so far."""
OnNotice = Callable[[str], None]
"""Called once with each distinct message to the user about how parts are combined."""

LIMIT_NAMES = ("train_tokens", "evaluate_tokens", "generate_rows", "score_rows")
"""Fields of :class:`LearnedLimits`. Tokens include padding."""

KEPT_AS = "autofit_guard"
"""The limits' key in ``trainer_state.json``, under ``stateful_callbacks``. It must not be a class's name: with
``--restore_callback_states_from_checkpoint`` transformers builds a callback of that class from its state alone
(``transformers/trainer.py: _load_callback_state``), and a guard needs its trainer."""

REPEATED = "repeated after the cache was emptied"
ON_HOST = "repeated with activations offloaded to the host"


class Limit:
    """Limits the tokens or rows that are processed at once. Deterministic: a repeated run splits in the same places.

    >>> limit = Limit(None, grow_after=2)
    >>> limit.failed(1000), limit.parts(1000, units=8)
    (None, 2)
    >>> limit.step_ended(), limit.step_ended(), limit.most  # after two clean steps, 2 x 500 covers every request
    (None, None, None)

    ``most``: the most that may be processed at once; None for everything. ``grow_after``: ``most`` is doubled after
    this many optimizer steps without a failure. If the doubled limit fails, twice as many steps are needed the next
    time."""

    def __init__(self, most: int | None, grow_after: int) -> None:
        self.most = most
        self._patience = grow_after
        self._clean = self._fitted = self._wanted = 0
        self._grown = False

    def exceeded_by(self, amount: int) -> bool:
        return self.most is not None and amount > self.most

    def parts(self, amount: int, units: int) -> int:
        """Returns the number of parts, at most ``units``, into which to cut an amount in advance."""
        if self.most is None or not self.exceeded_by(amount):
            return 1
        self._wanted = max(self._wanted, amount)
        return max(1, min(units, -(-amount // self.most)))

    def fitted(self, amount: int) -> None:
        """Records that this amount fitted at once."""
        self._fitted = max(self._fitted, amount)

    def failed(self, amount: int) -> None:
        """Records that this amount did not fit. The limit becomes the larger of its half and the most that fitted."""
        if self._fitted >= amount:
            self._fitted = 0  # the device has less free memory than before
        self.most = max(-(-amount // 2), self._fitted) if amount > 1 else 1
        self._wanted = max(self._wanted, amount)
        self._clean = 0
        if self._grown:
            self._patience *= 2
            self._grown = False

    def step_ended(self) -> None:
        if self.most is None:
            return
        self._clean += 1
        if self._clean < self._patience:
            return
        self._clean, self._grown = 0, True
        self.most = self.most * 2 if self.most * 2 < self._wanted else None


class GuardContext:
    """Holds the state of one trainer's guard. ``why_not``: why nothing can be repeated in this process, or None. The
    other arguments are those of :func:`~autotrain_mem.training.guard.attach.attach_guard`."""

    def __init__(
        self,
        trainer: Any,
        learned: LearnedLimits,
        on_incident: OnIncident,
        grow_after: int,
        why_not: str | None,
        on_notice: OnNotice,
        ranks: Ranks,
    ) -> None:
        self.trainer, self.ranks, self.why_not = trainer, ranks, why_not
        self.limits = {name: Limit(getattr(learned, name), grow_after) for name in LIMIT_NAMES}
        self.on_host = learned.activations_on_host
        self.gradients = Gradients()
        self.image_token = image_token_of(getattr(trainer, "model", None))
        self._on_incident, self._on_notice = on_incident, on_notice
        self._noticed: set[str] = set()

    @property
    def learned(self) -> LearnedLimits:
        return LearnedLimits(
            activations_on_host=self.on_host, **{name: limit.most for name, limit in self.limits.items()}
        )

    def save(self, learned: LearnedLimits | None = None) -> None:
        """Writes what was learned into the state that a checkpoint saves as ``trainer_state.json``."""
        self.trainer.state.stateful_callbacks[KEPT_AS] = {"learned": codec.to_json(learned or self.learned)}

    def save_of_all(self) -> None:
        """Saves the tightest limits of all ranks, since only rank 0 writes a checkpoint; all ranks must call it."""
        learned, least = self.learned, sys.maxsize
        limits = [getattr(learned, name) for name in LIMIT_NAMES]
        *negative, on_host = self.ranks.greatest(*(-(limit or least) for limit in limits), learned.activations_on_host)
        known = {name: None if -each == least else -each for name, each in zip(LIMIT_NAMES, negative, strict=True)}
        self.save(LearnedLimits(activations_on_host=bool(on_host), **known))

    def restore(self, state: Any) -> None:
        """Tightens the limits to those that :meth:`save` wrote into a trainer's state, if any."""
        if isinstance(saved := state.stateful_callbacks.get(KEPT_AS), dict):
            learned = codec.from_json(LearnedLimits, saved["learned"])
            for name, limit in self.limits.items():
                known = [most for most in (limit.most, getattr(learned, name)) if most is not None]
                limit.most = min(known, default=None)
            self.on_host |= learned.activations_on_host

    def step_ended(self) -> None:
        """Counts an optimizer step. After ``grow_after`` steps without a failure, the limits are doubled."""
        for limit in self.limits.values():
            limit.step_ended()
        if self.limits["train_tokens"].most is None:
            self.on_host = False

    def report(
        self, phase: Phase, remedy: str, full: RanOut, *, rows: int | None = None, tokens: int | None = None
    ) -> None:
        """Reports that memory ran out and how that is handled, and saves what was learned."""
        step = self.trainer.state.global_step
        incident = Incident(step=step, phase=phase, rows=rows, tokens=tokens, remedy=remedy, message=full.message)
        self.save()
        self._on_incident(incident, self.learned)

    def notice(self, message: str) -> None:
        """Sends a message to the user, once, from rank 0 alone."""
        if message not in self._noticed and not self.ranks.number:
            self._noticed.add(message)
            self._on_notice(message)

    def give_up(self, phase: Phase, full: RanOut, reason: str) -> NoReturn:
        """Raises torch.OutOfMemoryError, since nothing in this process can free enough memory."""
        where = phase.value.replace("_", " ")
        message = f"{full.message}\nNot repeated in smaller parts ({where}): {reason}."
        raise torch.OutOfMemoryError(message) from full.error


def keep_rng_state() -> Callable[[], None]:
    """Saves the random states of Python (GKD draws from it to choose the model that generates), numpy if imported,
    torch, and every CUDA device; returns a function that restores them."""
    python, on_host = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    on_cards = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(on_host)
        if numpy is not None:
            numpy.random.set_state(drawn)
        if on_cards is not None:
            torch.cuda.set_rng_state_all(on_cards)

    return restore


class Gradients:
    """Tracks which parameters got their gradient before a backward pass failed; no gradient is copied.

    Autograd adds to a parameter's ``.grad`` once per backward pass, after summing all contributions
    (``torch/csrc/autograd/functions/accumulate_grad.h``), and then runs its post-accumulate hooks. A parameter whose
    hook ran has the complete gradient of its micro-batch, so a repetition must not add to it.
    """

    def __init__(self) -> None:
        self._hooks: dict[int, Any] = {}
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []
        self._model: Any = None
        self.come_in_parts = False
        """True if a parameter got its gradient in several backward passes, as with reentrant checkpointing: then it is
        unknown which gradients are complete."""

    def follow(self, model: Any) -> None:
        """Begins to record which of a model's parameters got their gradient."""
        if model is self._model:
            return
        self._model = model

        def mark(parameter: Any) -> None:
            self.come_in_parts |= id(parameter) in self._done
            self._done[id(parameter)] = parameter

        for parameter in model.parameters():
            if parameter.requires_grad and id(parameter) not in self._hooks:
                self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(mark)

    def release(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._done.clear()
        self._model = None

    def begin(self) -> None:
        """Begins an attempt: no parameter has its gradient yet."""
        self._done = {}
        self.keep()

    def keep(self) -> None:
        """Freezes the parameters of :meth:`kept` again: PEFT unfreezes an adapter when DPO enables it again after the
        reference model's forward (``peft/tuners/tuners_utils.py: BaseTunerLayer.set_adapter``)."""
        for parameter in self._kept:
            parameter.requires_grad_(False)

    def done(self) -> list[Any]:
        """Returns the parameters that got their gradient in this attempt."""
        return list(self._done.values())

    @contextmanager
    def kept(self, parameters: list[Any]) -> Iterator[None]:
        """Within the block, these parameters get no gradient."""
        known = {id(parameter) for parameter in self._kept}
        changed = [parameter for parameter in parameters if id(parameter) not in known]
        before = self._kept
        self._kept = [*before, *changed]
        self.keep()
        try:
            yield
        finally:
            self._kept = before
            for parameter in changed:
                parameter.requires_grad_(True)
