"""Runs attention window by window on new tensors, under a separate recorder, and makes a :class:`Script` from it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _pop_mode_temporarily

from autotrain_mem.rehearsal.trace.flops import Mark
from autotrain_mem.rehearsal.trace.recorder import Played, Recorder, recorded_by
from autotrain_mem.types import Phase

Attend = Callable[[Recorder, Sequence[torch.Tensor]], tuple[Any, Callable[[], torch.Tensor]]]
"""Attends to all windows in turn; returns an object that the model's function keeps alive, and a function that joins
the results."""


class Saving(Enum):
    """Names how autograd treats the tensors that it saves."""

    NOTHING_SAVED = "no gradients are wanted"
    KEPT = "kept"
    DROPPED = "dropped, within a checkpoint"
    RECOMPUTED = "kept, when a checkpoint recomputes them"

    def hooks(self) -> AbstractContextManager[Any]:
        """Returns hooks like those of ``torch/utils/checkpoint.py: _checkpoint_hook, _recomputation_hook``."""
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
    def of(cls, tensor: torch.Tensor) -> "TensorLayout":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        """Returns an uninitialized tensor of this layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Describes a forward or a backward pass of all windows, up to joining their results."""

    steps: tuple[Played, ...]
    results: tuple[TensorLayout, ...]
    """The joined results, or the gradients of queries, keys and values."""
    with_results: tuple[tuple[int, ...], ...]
    """Blocks that are freed together with each result."""
    operators: int = 0
    """Number of operators that a replay of this pass does not run."""
    counts: Mark = field(default_factory=dict)
    """Work that a replay of this pass does not count."""

    def beside(self, whole: "Trial", played: "Trial", phase: Phase) -> "Pass":
        """Adds the operators and work of the windows' trial, ``whole``, that the replay's trial, ``played``, lacks."""
        more, less = (trial.recorder.work.counts(phase) for trial in (whole, played))
        counts = {key: more.get(key, 0.0) - less.get(key, 0.0) for key in {**more, **less}}
        return replace(
            self,
            operators=whole.operators[phase] - played.operators[phase],
            counts={key: count for key, count in counts.items() if count},
        )


class Script(NamedTuple):
    forward: Pass
    backward: Pass | None


class UnclearTrialError(Exception):
    """Signals that a script cannot describe what a trial did."""


class Trial:
    """Runs the forward pass, and also the backward pass if saved tensors are kept.

    Raises UnclearTrialError if a kernel keeps memory, such as a workspace.
    """

    def __init__(self, recorder: Recorder, inputs: Sequence[TensorLayout], saving: Saving, attend: Attend) -> None:
        self.recorder = recorder.fork()
        self.operators = {Phase.FORWARD: 0, Phase.BACKWARD: 0}
        self._outside: set[int] = set()
        """Blocks that the script omits: queries, keys and values, the joined results, and their gradients."""
        self.gradient = 0
        """The block of the results' gradient."""
        self.gradients: list[tuple[TensorLayout, int]] = []
        """The layout and block of the gradients of queries, keys and values."""
        with _pop_mode_temporarily(), self.recorder, recorded_by(self.recorder):
            self._run(inputs, saving, attend)
        if not self.recorder.has_kept_as_much_as(recorder):
            raise UnclearTrialError

    def _run(self, inputs: Sequence[TensorLayout], saving: Saving, attend: Attend) -> None:
        ledger = self.recorder.ledger
        self.recorder.enter_phase(Phase.FORWARD)
        leaf = torch.zeros((), device=inputs[0].device, requires_grad=saving is not Saving.NOTHING_SAVED)
        with saving.hooks():
            sources = _Source.apply(leaf, inputs, self)
            self._outside.update(born_as(self.recorder, source) for source in sources)
            self._begun, operators = len(ledger.events), ledger.operators
            alive, join = attend(self.recorder, sources)
            self._attended = len(ledger.events)
            result = join()
            self._joined_at = len(ledger.events)
            del alive, join, sources
        self._joined, self._result = TensorLayout.of(result), born_as(self.recorder, result)
        self._outside.add(self._result)
        self._left = self.ended = len(ledger.events)
        self.operators[Phase.FORWARD] = ledger.operators - operators
        if saving in (Saving.KEPT, Saving.RECOMPUTED):
            loss = _Sink.apply(result, self)
            del result
            operators = ledger.operators
            self.recorder.enter_phase(Phase.BACKWARD)
            with torch.autocast("cpu", enabled=False):  # trainers run the backward pass without autocast
                torch.autograd.grad(loss, leaf)
            self.operators[Phase.BACKWARD] -= operators
            self._outside |= {self.gradient, *(block for _, block in self.gradients)}

    def arrived(self, grads: Sequence[torch.Tensor]) -> None:
        """Records the gradients of queries, keys and values at the end of the backward pass."""
        self.ended, self.operators[Phase.BACKWARD] = len(self.recorder.ledger.events), self.recorder.ledger.operators
        self.gradients = [(TensorLayout.of(grad), born_as(self.recorder, grad)) for grad in grads]

    def story(self) -> list[Any]:
        """Returns births and deaths in order, with blocks numbered by birth and consecutive deaths sorted."""
        trace = self.recorder.trace()
        ledger = self.recorder.ledger
        births = [birth for number, birth in enumerate(ledger.births()) if not ledger.is_disowned(number)]
        order: dict[int, int] = {}
        story: list[Any] = []
        deaths: list[int] = []
        for event in (*trace.events[: self.ended], 0):
            if event < 0:
                deaths.append(order[-event])
                continue
            story += sorted(deaths)
            deaths = []
            if event:
                order[event] = len(order)
                story.append((trace.blocks[event - 1], births[event - 1]))
        return story

    def script(self) -> Script:
        """Returns the script. Raises UnclearTrialError if it cannot describe the trial."""
        steps = self._played(self._begun, self._attended)
        joins = self._events(self._attended, self._joined_at)
        leaving = self._events(self._joined_at, self._left)
        if joins != [self._result + 1] or any(event > 0 for event in leaving):
            raise UnclearTrialError
        with_outputs = tuple(-event - 1 for event in leaving if -event - 1 not in self._outside)
        forward = Pass(steps=steps, results=(self._joined,), with_results=(with_outputs,))
        return Script(forward, self._backward() if self.gradients else None)

    def _events(self, start: int, stop: int) -> list[int]:
        return [*self.recorder.ledger.events[start:stop]]

    def _played(self, start: int, stop: int) -> tuple[Played, ...]:
        """Returns the steps of the script's own blocks. Raises UnclearTrialError if another block is born."""
        births = self.recorder.ledger.births()
        steps: list[Played] = []
        for event in self._events(start, stop):
            if (number := abs(event) - 1) in self._outside:
                if event > 0:
                    raise UnclearTrialError
                continue
            size, with_grad, owner = births[number]
            steps.append((number, size, with_grad, owner) if event > 0 else (number, 0, with_grad, None))
        return tuple(steps)

    def _backward(self) -> Pass:
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
        return Pass(
            steps=self._played(events.index(self.gradient + 1) + 1, order[0]),
            results=tuple(layout for layout, _ in self.gradients),
            with_results=tuple(with_gradients),
        )


def born_as(recorder: Recorder, tensor: torch.Tensor) -> int:
    """Returns the block of a recorded tensor."""
    block = recorder.block_of(tensor)
    assert block is not None
    return block


class _Source(torch.autograd.Function):  # type: ignore[misc]  # untyped to mypy here
    """Creates queries, keys and values to which nothing else refers, and records their gradients."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, inputs: Sequence[TensorLayout], trial: Trial) -> tuple[torch.Tensor, ...]:
        ctx.trial = trial
        return tuple(layout.empty() for layout in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.trial.arrived(grads)
        return torch.zeros((), device=grads[0].device), None, None


class _Sink(torch.autograd.Function):  # type: ignore[misc]  # untyped to mypy here
    """Creates the gradient of the results, to which nothing else refers."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, trial: Trial) -> torch.Tensor:
        ctx.layout, ctx.trial = TensorLayout.of(result), trial
        return result.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = ctx.layout.empty()
        ctx.trial.gradient = born_as(ctx.trial.recorder, gradient)
        return gradient, None
