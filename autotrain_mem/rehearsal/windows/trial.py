"""Tries attention over many windows beside the run, on tensors of its own, and reads what it allocated.

A trial is recorded by a recorder apart, so that nothing of it reaches the run. What it tells is a :class:`Script`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.utils._python_dispatch import _pop_mode_temporarily

from autotrain_mem.rehearsal.trace.flops import Mark
from autotrain_mem.rehearsal.trace.recorder import Played, Recorder, recorded_by
from autotrain_mem.types import Phase

Attend = Callable[[Recorder, Sequence[torch.Tensor]], tuple[Any, Callable[[], torch.Tensor]]]
"""Attends to queries, keys and values of all windows, in turn: returns what stays alive while the model's function
runs, and what joins the results."""


class Saving(Enum):
    """Describes what becomes of the tensors that autograd saves."""

    NOTHING_SAVED = "no gradients are wanted"
    KEPT = "kept"
    DROPPED = "dropped, within a checkpoint"
    RECOMPUTED = "kept as a checkpoint recomputes them"

    def hooks(self) -> AbstractContextManager[Any]:
        """Treats saved tensors as ``torch/utils/checkpoint.py: _checkpoint_hook, _recomputation_hook``."""
        hooked: Callable[..., AbstractContextManager[Any]] = torch.autograd.graph.saved_tensors_hooks
        if self is Saving.DROPPED:
            return hooked(lambda tensor: None, lambda nothing: nothing)
        if self is Saving.RECOMPUTED:
            return hooked(lambda tensor: tensor.detach() if tensor.requires_grad else tensor, lambda tensor: tensor)
        return nullcontext()


@dataclass(frozen=True, slots=True)
class TensorLayout:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        """Makes one without values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Extra:
    """Counts what the whole has more than what is run in its place."""

    operators: int = 0
    counts: Mark = field(default_factory=dict)

    def over(self, other: Extra) -> Extra:
        keys = {**self.counts, **other.counts}
        more = {key: self.counts.get(key, 0.0) - other.counts.get(key, 0.0) for key in keys}
        return Extra(
            operators=self.operators - other.operators, counts={key: count for key, count in more.items() if count}
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardScript:
    """Holds what the forward pass of all windows does, up to where their results are joined."""

    steps: tuple[Played, ...]
    with_outputs: tuple[int, ...]
    """Blocks that die with the windows' results."""
    kept: tuple[int, ...]
    """Blocks that the backward pass ends."""
    joined: TensorLayout
    """The results as one."""
    extra: Extra = Extra()


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardScript:
    """Holds what the backward pass of all windows does, up to where their gradients are joined."""

    steps: tuple[Played, ...]
    gradients: tuple[TensorLayout, ...]
    """Of queries, keys and values."""
    with_gradients: tuple[tuple[int, ...], ...]
    """Blocks that die as each of these is made."""
    extra: Extra = Extra()


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    forward: ForwardScript
    backward: BackwardScript | None


class UnclearTrialError(Exception):
    """Signals that a trial did something that no script tells."""


@dataclass(kw_only=True, slots=True)
class Trial:
    """Holds what was recorded, and where its parts begin."""

    recorder: Recorder
    inputs: tuple[int, ...]
    begun: int
    attended: int
    joined_at: int
    left: int
    joined: TensorLayout
    result: int
    gradient: int | None = None
    """The block of the gradient that the results get."""
    gradients: tuple[tuple[TensorLayout, int], ...] = ()
    """Of queries, keys and values: as they arrive, and their blocks."""
    ended: int = 0
    operators: tuple[int, int] = (0, 0)
    """The number of operators of the forward and of the backward pass."""

    def extras(self) -> tuple[Extra, Extra]:
        """Counts all operators of each pass."""
        passes = zip(self.operators, (Phase.FORWARD, Phase.BACKWARD), strict=True)
        forward, backward = (
            Extra(operators=operators, counts=self.recorder.work.counts(phase)) for operators, phase in passes
        )
        return forward, backward

    def story(self) -> list[Any]:
        """Returns what happened, blocks by their order of birth, and deaths in a row in that order too."""
        trace = self.recorder.trace()
        ledger = self.recorder.ledger
        births = [birth for number, birth in enumerate(ledger.births()) if not ledger.is_disowned(number)]
        order: dict[int, int] = {}
        told: list[Any] = []
        deaths: list[int] = []
        for event in (*trace.events[: self.ended], 0):
            if event < 0:
                deaths.append(order[-event])
                continue
            told += sorted(deaths)
            deaths = []
            if event:
                order[event] = len(order)
                told.append((trace.blocks[event - 1], births[event - 1]))
        return told

    # -- as a script -----------------------------------------------------------------------------------------------

    def script(self) -> Script:
        """Reads it. Raises UnclearTrialError."""
        inside = self._played(self.begun, self.attended)
        joins = self._events(self.attended, self.joined_at)
        if joins != [self.result + 1]:
            raise UnclearTrialError
        leaving = self._events(self.joined_at, self.left)
        if any(event > 0 for event in leaving):
            raise UnclearTrialError
        with_outputs = [-event - 1 for event in leaving if -event - 1 not in self._outside]
        born = {number for number, size, *_ in inside if size}
        gone = {number for number, size, *_ in inside if not size} | {*with_outputs}
        forward = ForwardScript(
            steps=inside,
            with_outputs=tuple(with_outputs),
            kept=tuple(sorted(born - gone)),
            joined=self.joined,
        )
        return Script(forward=forward, backward=self._backward() if self.gradients else None)

    @property
    def _outside(self) -> set[int]:
        outside = {*self.inputs, self.result, *(block for _, block in self.gradients)}
        return outside if self.gradient is None else outside | {self.gradient}

    def _events(self, start: int, stop: int) -> list[int]:
        return [*self.recorder.ledger.events[start:stop]]

    def _played(self, start: int, stop: int) -> tuple[Played, ...]:
        """Reads steps but those of tensors outside. Raises UnclearTrialError where one of these is born."""
        births = self.recorder.ledger.births()
        steps: list[Played] = []
        for event in self._events(start, stop):
            number = abs(event) - 1
            if number in self._outside:
                if event > 0:
                    raise UnclearTrialError
                continue
            size, with_grad, owner = births[number]
            steps.append((number, size, with_grad, owner) if event > 0 else (number, 0, with_grad, None))
        return tuple(steps)

    def _backward(self) -> BackwardScript:
        assert self.gradient is not None
        events = [*self.recorder.ledger.events]
        born = [events.index(block + 1) for _, block in self.gradients]
        order = sorted(born)
        ends = dict(zip(order, (*order[1:], self.ended), strict=True))
        with_gradients = []
        for at in born:
            steps = self._played(at + 1, ends[at])
            if any(size for _, size, *_ in steps):
                raise UnclearTrialError
            with_gradients.append(tuple(number for number, *_ in steps))
        return BackwardScript(
            steps=self._played(events.index(self.gradient + 1) + 1, order[0]),
            gradients=tuple(layout for layout, _ in self.gradients),
            with_gradients=tuple(with_gradients),
        )


def tried(recorder: Recorder, inputs: Sequence[TensorLayout], saving: Saving, attend: Attend) -> Trial:
    """Runs a trial: the forward pass and, where what it saves is kept, the backward pass.

    Raises:
        UnclearTrialError: a kernel took memory for good.
    """
    apart = recorder.apart()
    with _pop_mode_temporarily(), apart, recorded_by(apart):
        trial = _forward(apart, inputs, saving, attend)
    if not apart.has_kept_as_much_as(recorder):
        raise UnclearTrialError
    return trial


def _forward(apart: Recorder, inputs: Sequence[TensorLayout], saving: Saving, attend: Attend) -> Trial:
    ledger = apart.ledger
    apart.enter_phase(Phase.FORWARD)
    wants_grad = saving is not Saving.NOTHING_SAVED
    leaf = torch.zeros((), device=inputs[0].device, requires_grad=wants_grad)
    end = _End(apart)
    with saving.hooks():
        sources = _Source.apply(leaf, inputs, end)
        blocks = tuple(born_as(apart, source) for source in sources)
        begun, operators = len(ledger.events), ledger.operators
        alive, join = attend(apart, sources)
        attended = len(ledger.events)
        result = join()
        joined_at = len(ledger.events)
        del alive, join, sources
    trial = Trial(
        recorder=apart,
        inputs=blocks,
        begun=begun,
        attended=attended,
        joined_at=joined_at,
        left=len(ledger.events),
        joined=TensorLayout.of(result),
        result=born_as(apart, result),
        ended=len(ledger.events),
        operators=(ledger.operators - operators, 0),
    )
    if saving in (Saving.KEPT, Saving.RECOMPUTED):
        loss = _Sink.apply(result, end)
        del result
        _backward(trial, loss, leaf, end)
    return trial


def _backward(trial: Trial, loss: torch.Tensor, leaf: torch.Tensor, end: _End) -> None:
    apart, operators = trial.recorder, trial.recorder.ledger.operators
    apart.enter_phase(Phase.BACKWARD)
    with torch.autocast("cpu", enabled=False):  # trainers go backward outside of it
        torch.autograd.grad(loss, leaf)
    trial.operators = (trial.operators[0], end.operators - operators)
    trial.gradient, trial.gradients, trial.ended = end.gradient, tuple(end.gradients), end.at


def born_as(recorder: Recorder, tensor: torch.Tensor) -> int:
    """Returns the block of a tensor that a recorder has seen."""
    block = recorder.block_of(tensor)
    assert block is not None
    return block


class _End:
    """Records what reaches the ends of a trial's graph."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.gradient: int | None = None
        self.gradients: list[tuple[TensorLayout, int]] = []
        self.at = self.operators = 0


class _Source(torch.autograd.Function):  # type: ignore[misc]  # untyped to mypy here
    """Makes queries, keys and values that nobody else holds, and notes their gradients."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, inputs: Sequence[TensorLayout], end: _End) -> tuple[torch.Tensor, ...]:
        ctx.end = end
        return tuple(layout.empty() for layout in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        end, ledger = ctx.end, ctx.end.recorder.ledger
        end.at, end.operators = len(ledger.events), ledger.operators
        end.gradients = [(TensorLayout.of(grad), born_as(end.recorder, grad)) for grad in grads]
        return torch.zeros((), device=grads[0].device), None, None


class _Sink(torch.autograd.Function):  # type: ignore[misc]  # untyped to mypy here
    """Makes the gradient of the results, which nobody else holds."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, end: _End) -> torch.Tensor:
        ctx.layout, ctx.end = TensorLayout.of(result), end
        return result.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = ctx.layout.empty()
        ctx.end.gradient = born_as(ctx.end.recorder, gradient)
        return gradient, None
