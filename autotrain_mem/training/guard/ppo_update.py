"""Keeps a PPO micro-batch going when the device is full: only the models see it in parts.

TRL's loop computes its loss over a whole micro-batch and cannot be entered again in its middle, so the graph is cut at
the models' outputs, and the loss is computed of all rows at once, as ever::

    inputs -> model -> outputs | cut | outputs -> loss

The loss's backward ends at the cut and leaves the outputs' gradients in a list, from which the models' part can be done
again. Both sides of the cut share the outputs' storage. Gradients are those of the whole micro-batch, to rounding. They
are not where a model draws random numbers in its training forward: TRL turns dropout modules off, a config's
``attention_dropout`` it leaves.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from autotrain_mem.training.full_device import Full, attempt, is_out_of_memory, release
from autotrain_mem.training.guard.context import REPEATED, GuardContext
from autotrain_mem.training.guard.micro_step import activations_on_host
from autotrain_mem.training.guard.ppo_rollout import Finished, Parts
from autotrain_mem.training.guard.ranks import average, ddp_of, prepare
from autotrain_mem.types import Phase

LOSS_NEEDS_LOGITS_ONLY = (torch.float32, torch.float64)
"""With these, the loss's graph holds the logits and little else; with others, log-probabilities as large as they
(``trl/trainer/utils.py: selective_log_softmax``)."""

WITHOUT_GRAPH = "repeated without the models' graph"
PASSED = "none: TRL's loop makes the loss, and cannot be entered again; smaller parts after a new start"
AT_ONCE = "the loss of a micro-batch is made at once, and the gradients of its logits do not fit beside them"
HALF_PRECISION = "the loss of logits in half precision keeps no graph of its own"


@dataclass(slots=True, weakref_slot=True)
class _Output:
    """The policy's output as TRL's loop sees it."""

    logits: torch.Tensor
    whole: Any
    """The output itself, which lives as long as TRL would let it: its hidden states hold the graph."""


@dataclass(slots=True)
class _MicroBatch:
    """Between its forward and its backward."""

    model: Any
    rows: torch.Tensor
    """Token ids, one row per completion with its prompt."""
    pad: int
    outputs: tuple[torch.Tensor, ...] | None = None
    """Of the models, with their graph; None where they are run again in the backward."""
    is_repeatable: bool = True
    """Whether the loss's graph is kept through its backward."""
    caught: list[torch.Tensor] = field(default_factory=list)
    """The outputs' gradients, once the loss has had its backward."""


class MicroBatches:
    """Stands in for forward and backward of one PPO trainer, for its ``train``, and for the larger part of its loss."""

    def __init__(self, context: GuardContext) -> None:
        trainer = self._trainer = context.trainer
        self._context, self._parts = context, Parts(context, "train_tokens")
        self._micro: _MicroBatch | None = None
        self._last_output: weakref.ref[_Output] | None = None
        self._trl_forward, trainer._forward = trainer._forward, self.forward
        self._trl_log_probabilities, trainer._log_probabilities = trainer._log_probabilities, self.log_probabilities
        self._trl_backward, trainer.accelerator.backward = trainer.accelerator.backward, self.backward
        self._trl_train, trainer.train = trainer.train, self.train

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self, model: Any, rows: torch.Tensor, pad: int) -> Any:
        """Whole, with its graph kept on this side of the cut; or the outputs only, where parts are needed."""
        if not torch.is_grad_enabled():
            return self._trl_forward(model, rows, pad)
        micro = _MicroBatch(model, rows, pad)
        if (ddp := ddp_of(model)) is not None:
            prepare(ddp)
        whole = self._whole_output(micro)
        logits, values = micro.outputs or self._outputs_in_parts(micro)
        micro.is_repeatable = micro.outputs is None or logits.dtype in LOSS_NEEDS_LOGITS_ONLY
        logits, values = _cut((logits, values), micro.caught)
        output = _Output(logits, whole)
        self._micro, self._last_output = micro, weakref.ref(output)
        return output, values

    def _whole_output(self, micro: _MicroBatch) -> Any:
        """The policy's output, where all rows may be done at once and nothing is refused."""
        if self._parts.limit.exceeded_by(micro.rows.numel()):
            return None
        outcome = attempt(lambda: self._local_forward(micro, micro.rows))
        if isinstance(outcome, Full):
            self._let_go(micro)
            self._parts.halve(Phase.FORWARD, outcome, *micro.rows.shape)
            return None
        output, values = outcome.value
        micro.outputs = (output.logits, values)
        return output

    def _outputs_in_parts(self, micro: _MicroBatch) -> tuple[torch.Tensor, ...]:
        """Logits and values of all rows, with no graph."""
        whole: list[torch.Tensor] = []

        def put(rows: slice, _: Finished) -> None:
            with torch.no_grad():
                parts = self._outputs(micro, rows)
            if not whole:
                whole.extend([part.new_empty((len(micro.rows), *part.shape[1:])) for part in parts])
            for all_rows, part in zip(whole, parts, strict=True):
                all_rows[rows] = part

        self._parts.each(Phase.FORWARD, range(len(micro.rows)), micro.rows.shape[1], put)
        return tuple(whole)

    def _outputs(self, micro: _MicroBatch, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        output, values = self._local_forward(micro, micro.rows[rows])
        return output.logits, values

    def _local_forward(self, micro: _MicroBatch, rows: torch.Tensor) -> Any:
        """Go through the models; DDP averages nothing in the backward of this, which may be done in parts."""
        ddp = ddp_of(micro.model)
        with nullcontext() if ddp is None else ddp.no_sync():
            return self._trl_forward(micro.model, rows, micro.pad)

    def log_probabilities(self, logits: torch.Tensor, index: torch.Tensor) -> Any:
        """The largest part of the loss; once it needed the memory of the graph, the backward goes in parts."""
        outcome = attempt(lambda: self._trl_log_probabilities(logits, index))
        if not isinstance(outcome, Full):
            return outcome.value
        if self._micro is not None:
            self._without_graph(Phase.FORWARD, self._micro, outcome)
        else:
            self._report(Phase.SCORE, index, REPEATED, outcome)
        return self._trl_log_probabilities(logits, index)

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """First into the outputs, then through the models: at once, or what is left of it in parts."""
        micro, self._micro = self._micro, None
        if micro is None:
            self._trl_backward(loss, **options)
            return
        self._into_gradients(micro, loss, options)
        if (ddp := ddp_of(micro.model)) is not None:
            self._context.gradients.begin()  # what averages gradients over ranks makes none
            average(self._context.ranks, ddp)

    def _into_gradients(self, micro: _MicroBatch, loss: torch.Tensor, options: dict[str, Any]) -> None:
        options["retain_graph"] = micro.is_repeatable
        self._into_outputs(micro, loss, options)
        if micro.outputs is None:
            self._through_parts(micro, ())
            return
        self._context.gradients.begin()
        outputs, micro.outputs = micro.outputs, None
        full = attempt(functools.partial(_backward_from, outputs, micro.caught))
        del outputs
        if not isinstance(full, Full):
            self._parts.limit.fitted(micro.rows.numel())
            return
        finished = self._context.gradients.done()
        self._let_go(micro)
        self._parts.halve(Phase.BACKWARD, full, *micro.rows.shape)
        if not micro.caught:
            self._into_outputs(micro, loss, options)
        self._through_parts(micro, finished)

    def _into_outputs(self, micro: _MicroBatch, loss: torch.Tensor, options: dict[str, Any]) -> None:
        """The loss's graph, where it is kept, is small beside the logits, which TRL's loop holds anyway."""
        full = attempt(lambda: self._trl_backward(loss, **options))
        if isinstance(full, Full):
            self._without_graph(Phase.BACKWARD, micro, full)
            full = attempt(lambda: self._trl_backward(loss, **options)) if micro.is_repeatable else full
        if isinstance(full, Full):
            self._context.give_up(Phase.BACKWARD, full, AT_ONCE if micro.is_repeatable else HALF_PRECISION)

    def _without_graph(self, phase: Phase, micro: _MicroBatch, full: Full) -> None:
        """Drop the graph beside which something did not fit; the next micro-batches are done in parts at once."""
        had_graph = micro.outputs is not None
        self._let_go(micro)
        if had_graph and len(micro.rows) > 1:
            self._parts.shrink(*micro.rows.shape)
        self._report(phase, micro.rows, WITHOUT_GRAPH, full)

    def _through_parts(self, micro: _MicroBatch, finished: Finished) -> None:
        def through(rows: slice, finished: Finished) -> None:
            # What the backward of a single row needs is kept on the host, where it would not fit otherwise.
            is_on_host = self._context.on_host and rows.stop - rows.start == 1
            memory = activations_on_host(micro.model) if is_on_host else nullcontext()
            with self._context.gradients.kept(list(finished)), memory:
                outputs = self._outputs(micro, rows)
                self._trainer.phase_began(Phase.BACKWARD)
                _backward_from(outputs, [gradient[rows] for gradient in micro.caught])

        self._parts.each(Phase.BACKWARD, range(len(micro.rows)), micro.rows.shape[1], through, finished)

    def _report(self, phase: Phase, rows: torch.Tensor, remedy: str, full: Full) -> None:
        self._context.report(phase, remedy, full, rows=len(rows), tokens=rows.numel())

    def _let_go(self, micro: _MicroBatch | None) -> None:
        """Drop the graph, and what TRL's loop still holds of it, or of the one before."""
        if micro is not None:
            micro.outputs = None
        output = self._last_output() if self._last_output is not None else None
        if output is not None:
            output.whole = None
        release()

    def train(self, *args: Any, **options: Any) -> Any:
        """Train; a refusal between forward and backward ends it. The next process works in parts from its start."""
        self._context.gradients.follow(self._trainer.model)
        try:
            return self._trl_train(*args, **options)
        except Exception as error:
            micro, self._micro = self._micro, None
            if micro is not None and is_out_of_memory(error):
                self._parts.shrink(*micro.rows.shape)
                full = Full(error=error, message=str(error).partition("\n")[0])
                self._report(Phase.FORWARD, micro.rows, PASSED, full)
            raise


# -- the cut --------------------------------------------------------------------------------------------------------


class _Cut(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped to mypy here
    """Detaches outputs from their model; their gradients are put into ``caught``.

    They are marked as changed in place, which makes them neither leaves nor views: TRL divides its logits in place.
    """

    @staticmethod
    def forward(ctx: Any, caught: list[torch.Tensor], anchor: torch.Tensor, *outputs: torch.Tensor) -> Any:
        ctx.caught = caught
        ctx.mark_dirty(*outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.caught[:] = gradients
        return (None,) * (2 + len(gradients))


class _GoOn(torch.autograd.Function):  # type: ignore[misc]
    """A root whose backward hands over the caught gradients and keeps none: each is freed once it is used."""

    @staticmethod
    def forward(ctx: Any, caught: list[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.caught = caught
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        gradients = tuple(ctx.caught)
        ctx.caught.clear()
        return None, *gradients


def _cut(outputs: Sequence[torch.Tensor], caught: list[torch.Tensor]) -> list[torch.Tensor]:
    """Give the same values, for a loss; its backward fills ``caught`` with one gradient per output."""
    anchor = outputs[0].new_empty(0).requires_grad_()
    return list(_Cut.apply(caught, anchor, *(output.detach() for output in outputs)))


def _backward_from(outputs: Sequence[torch.Tensor], caught: list[torch.Tensor]) -> None:
    """Goes on with the backward that was cut; empties ``caught``. Does nothing where no output has a graph."""
    if any(output.requires_grad for output in outputs):
        root = _GoOn.apply(caught, *outputs)
        torch.autograd.backward((root,), (torch.empty_like(root),))
