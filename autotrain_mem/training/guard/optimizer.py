"""Repeats clipping and the optimizer's step where the first try changed nothing, and else not.

A tensor that an operator writes counts its versions (``torch/csrc/autograd/VariableTypeUtils.h: increment_version``),
which tells whether a try that ran out of memory had begun to write.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from autotrain_mem.training.full_device import Full, attempt, release
from autotrain_mem.training.guard.context import REPEATED, GuardContext
from autotrain_mem.types import Phase

HALF_MADE = "some parameters had their update already: only a checkpoint has all of them as they were"
HALF_CLIPPED = "some gradients were scaled already: only a checkpoint goes back before them"


class OptimizerSteps:
    """Stands in for ``step`` of one optimizer, and for the function that clips its gradients."""

    def __init__(self, context: GuardContext) -> None:
        self._context = context
        self._followed: Any = None
        self._guarded: Any = None
        self._own_step: Any = None

    def follow(self, optimizer: Any) -> None:
        """Repeat a step of this optimizer, which accelerate has wrapped, when it runs out of memory."""
        if optimizer is self._followed or optimizer is None:
            return
        self._followed = optimizer
        self._own_step = vars(optimizer).get("step")
        step = optimizer.step

        @functools.wraps(step)  # with the mark by which torch's schedulers know a step that they have seen
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return self._step(optimizer, lambda: step(*args, **kwargs))

        optimizer.step = self._guarded = guarded

    def leave(self) -> None:
        """The optimizer's step is its own again, unless somebody has put another around this one."""
        if self._followed is not None and vars(self._followed).get("step") is self._guarded:
            del self._followed.step
            if self._own_step is not None:
                self._followed.step = self._own_step
        self._followed = self._guarded = None

    def follow_clipping(self, owner: Any, name: str, parameters_of: Callable[[Any], Iterable[Any]]) -> None:
        """Repeat ``owner.name``, which clips gradients, when its norm's temporaries do not fit.

        Args:
            parameters_of: Takes the function's first argument; gives the parameters whose gradients it clips.
        """
        clip = getattr(owner, name)

        def guarded(clipped: Any, *args: Any, **options: Any) -> Any:
            gradients = [each.grad for each in parameters_of(clipped) if each.grad is not None]
            return self._clip(gradients, lambda: clip(clipped, *args, **options))

        setattr(owner, name, guarded)

    def _clip(self, gradients: list[Any], clip: Callable[[], Any]) -> Any:
        """Clip; once more where the first try changed no gradient: what was scaled cannot be scaled again.

        Their versions do not tell it with fp16: there the loss's scale is taken off them first, by an operator that
        counts none up, and a second time raises (``torch/amp/grad_scaler.py: unscale_``).
        """
        before = [gradient._version for gradient in gradients]
        outcome = attempt(clip)
        if not isinstance(outcome, Full):
            return outcome.value
        is_begun = [gradient._version for gradient in gradients] != before
        is_begun = is_begun or self._context.trainer.accelerator.scaler is not None
        reason = HALF_CLIPPED if is_begun else self._context.why_not
        if reason:
            self._context.give_up(Phase.OPTIMIZER_STEP, outcome, reason)
        norm = clip()
        self._context.report(Phase.OPTIMIZER_STEP, REPEATED, outcome)
        return norm

    def _step(self, wrapped: Any, step: Callable[[], Any]) -> Any:
        optimizer = getattr(wrapped, "optimizer", wrapped)
        self._make_state(optimizer)
        before = _Untouched(optimizer)
        outcome = attempt(step)
        if not isinstance(outcome, Full):
            return outcome.value
        is_seen_through = not hasattr(optimizer, "_inner")  # ours on the host has copies that it writes first
        reason = self._context.why_not if is_seen_through and before.holds() else HALF_MADE
        if reason:
            self._context.give_up(Phase.OPTIMIZER_STEP, outcome, reason)
        before.take_back_new_state()
        # Parameters are updated one by one from now on: their temporaries never lie side by side. The same numbers.
        groups = [group for group in optimizer.param_groups if group.get("foreach", False) is not False]
        groups = [group for group in groups if not group.get("fused")]
        for group in groups:
            group["foreach"] = False
        release()
        value = step()
        remedy = "repeated with one parameter after the other" if groups else REPEATED
        self._context.report(Phase.OPTIMIZER_STEP, remedy, outcome)
        return value

    def _make_state(self, optimizer: Any) -> None:
        """Make all of Adam's state before its first step, which else makes and updates one group's after the other."""
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or optimizer.state:
            return
        if len(inspect.signature(optimizer._init_group).parameters) != STATE_ARGUMENTS:
            return
        outcome = attempt(lambda: _init_all(optimizer))
        if not isinstance(outcome, Full):
            return
        optimizer.state.clear()
        release()
        _init_all(optimizer)
        self._context.report(Phase.OPTIMIZER_STEP, REPEATED, outcome)


STATE_ARGUMENTS = 7
"""Of ``torch/optim/adam.py: Adam._init_group``: a group, and six lists that it fills."""


def _init_all(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        optimizer._init_group(group, *([] for _ in range(STATE_ARGUMENTS - 1)))


class _Untouched:
    """Remembers what an optimizer's step would write, as it was before.

    Versions tell of operators that write one tensor, and of ``_foreach_*_`` in torch 2.13. ``_fused_adamw_`` counts
    none up, but the steps in the state are counted by ``_foreach_add_`` before it (``torch/optim/adam.py:
    _fused_adam``), and those in bitsandbytes' state are numbers. Under a dispatch mode, as a simulated card's recorder
    is, no operator on lists counts versions up: there the steps themselves are read.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._kinds = (int, float, torch.Tensor) if is_in_torch_dispatch_mode() else (int, float)
        self._versions = [(tensor, tensor._version) for tensor in _written(optimizer)]
        states = optimizer.state.items()
        self._numbers_before = {id(parameter): self._numbers(state) for parameter, state in states if state}

    def holds(self) -> bool:
        """Whether all of it is surely as it was, and what is new was made and not yet used."""
        if any(tensor._version != version for tensor, version in self._versions):
            return False
        before, optimizer = self._numbers_before, self._optimizer
        states = [(before.get(id(parameter)), state) for parameter, state in optimizer.state.items() if state]
        # On CUDA foreach is the default (``torch/optim/optimizer.py: _default_to_fused_or_foreach``).
        lists = [group.get("fused") or group.get("foreach", False) is not False for group in optimizer.param_groups]
        if any(lists) and not all("step" in state for _, state in states):
            return False
        # Every optimizer's state begins as nothing but zeros; it is read after the cache was emptied.
        new = [state for known, state in states if known is None]
        if any(any(self._numbers(state).values()) or any(map(torch.any, _tensors(state))) for state in new):
            return False
        return all(self._numbers(state) == known for known, state in states if known is not None)

    def take_back_new_state(self) -> None:
        """Remove state that the try began to make."""
        state = self._optimizer.state
        for parameter in [parameter for parameter in state if id(parameter) not in self._numbers_before]:
            del state[parameter]

    def _numbers(self, state: Any) -> dict[str, float]:
        numbers = {name: value for name, value in state.items() if isinstance(value, self._kinds)}
        return {name: float(value) for name, value in numbers.items() if getattr(value, "numel", lambda: 1)() == 1}


def _written(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    for state in optimizer.state.values():
        yield from _tensors(state)


def _tensors(state: Any) -> Iterator[Any]:
    return (value for value in state.values() if hasattr(value, "_version"))
