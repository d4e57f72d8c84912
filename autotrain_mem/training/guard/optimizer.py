"""Repeats clipping and the optimizer's step where the first try changed nothing, and else not.

A tensor that an operator writes counts its versions (``torch/csrc/autograd/VariableTypeUtils.h: increment_version``),
which tells whether a try that ran out of memory had begun to write.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotrain_mem.spec import Phase
from autotrain_mem.training.guard.context import REPEATED, GuardContext
from autotrain_mem.training.out_of_memory import Full, attempt, release

HALF_MADE = "some parameters had their update already: only a checkpoint has all of them as they were"
HALF_CLIPPED = "some gradients were scaled already: only a checkpoint goes back before them"


def clips_only_once(accelerator: Any) -> bool:
    """Whether clipping cannot be begun again, whatever the gradients' versions say: with fp16 it takes the loss's scale
    off them first, by an operator that counts none up, and a second time raises (``torch/amp/grad_scaler.py:
    unscale_``)."""
    return accelerator.scaler is not None


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
        """Clip; once more where the first try changed no gradient: what was scaled cannot be scaled again."""
        before = [gradient._version for gradient in gradients]
        outcome = attempt(clip)
        if not isinstance(outcome, Full):
            return outcome.value
        is_begun = [gradient._version for gradient in gradients] != before
        is_begun = is_begun or clips_only_once(self._context.trainer.accelerator)
        reason = HALF_CLIPPED if is_begun else self._context.why_not
        if reason:
            self._context.give_up(Phase.OPTIMIZER_STEP, outcome, reason)
        norm = clip()
        self._context.report(Phase.OPTIMIZER_STEP, REPEATED, outcome)
        return norm

    def _step(self, wrapped: Any, step: Callable[[], Any]) -> Any:
        optimizer = getattr(wrapped, "optimizer", wrapped)
        self._make_state(optimizer)
        before = _Untouched.of(optimizer)
        outcome = attempt(step)
        if not isinstance(outcome, Full):
            return outcome.value
        is_seen_through = not hasattr(optimizer, "_inner")  # ours on the host has copies that it writes first
        reason = self._context.why_not if is_seen_through and before.holds_for(optimizer) else HALF_MADE
        if reason:
            self._context.give_up(Phase.OPTIMIZER_STEP, outcome, reason)
        before.take_back_new_state(optimizer)
        one_by_one = _without_foreach(optimizer)
        release()
        value = step()
        remedy = "repeated with one parameter after the other" if one_by_one else REPEATED
        self._context.report(Phase.OPTIMIZER_STEP, remedy, outcome)
        return value

    def _make_state(self, optimizer: Any) -> None:
        """Make all of Adam's state before its first step, which else makes and updates one group's after the other."""
        if not _makes_state_apart(optimizer):
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


def _makes_state_apart(optimizer: Any) -> bool:
    import torch

    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or optimizer.state:
        return False
    return len(inspect.signature(optimizer._init_group).parameters) == STATE_ARGUMENTS


def _init_all(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        optimizer._init_group(group, *([] for _ in range(STATE_ARGUMENTS - 1)))


def _without_foreach(optimizer: Any) -> bool:
    """Update parameters one by one from now on: their temporaries never lie side by side. The same numbers."""
    changed = False
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is not False and not group.get("fused"):
            group["foreach"] = False
            changed = True
    return changed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Untouched:
    """Remembers what an optimizer's step would write, as it was before.

    Versions tell of operators that write one tensor, and of ``_foreach_*_`` in torch 2.13. ``_fused_adamw_`` counts
    none up, but the steps in the state are counted by ``_foreach_add_`` before it (``torch/optim/adam.py:
    _fused_adam``), and those in bitsandbytes' state are numbers. Under a dispatch mode, as a simulated card's recorder
    is, no operator on lists counts versions up: there the steps themselves are read.
    """

    written: tuple[tuple[Any, int], ...]
    """Each tensor, and its version."""
    states: Mapping[int, Mapping[str, float]]
    """Per parameter, by its id: the numbers in its state."""

    @classmethod
    def of(cls, optimizer: Any) -> _Untouched:
        written = tuple((tensor, tensor._version) for tensor in _written(optimizer))
        kinds = _kinds()
        states = {id(parameter): _numbers(state, kinds) for parameter, state in optimizer.state.items() if state}
        return cls(written=written, states=states)

    def holds_for(self, optimizer: Any) -> bool:
        """Whether all of it is surely as it was, and what is new was made and not yet used."""
        if any(tensor._version != version for tensor, version in self.written):
            return False
        states = [(self.states.get(id(parameter)), state) for parameter, state in optimizer.state.items() if state]
        if _writes_lists(optimizer) and not all("step" in state for _, state in states):
            return False
        return all(_is_new(state) if known is None else _numbers(state) == known for known, state in states)

    def take_back_new_state(self, optimizer: Any) -> None:
        """Remove state that the try began to make."""
        for parameter in [parameter for parameter in optimizer.state if id(parameter) not in self.states]:
            del optimizer.state[parameter]


def _writes_lists(optimizer: Any) -> bool:
    """On CUDA foreach is the default (``torch/optim/optimizer.py: _default_to_fused_or_foreach``)."""
    return any(group.get("fused") or group.get("foreach", False) is not False for group in optimizer.param_groups)


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


def _numbers(state: Any, kinds: tuple[Any, ...] | None = None) -> dict[str, float]:
    kinds = _kinds() if kinds is None else kinds
    return {name: float(value) for name, value in state.items() if isinstance(value, kinds) and _is_one(value)}


def _kinds() -> tuple[Any, ...]:
    import torch
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode

    return (int, float, torch.Tensor) if is_in_torch_dispatch_mode() else (int, float)


def _is_one(value: Any) -> bool:
    return not hasattr(value, "numel") or bool(value.numel() == 1)


def _is_new(state: Any) -> bool:
    """Whether it is as every optimizer's state begins: nothing but zeros. Read after the cache was emptied."""
    return not any(_numbers(state).values()) and not any(bool(tensor.any()) for tensor in _tensors(state))
