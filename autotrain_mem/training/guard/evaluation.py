"""Repeats an evaluation step that ran out of memory on parts of its batch: the same loss, the same predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from autotrain_mem.spec import Phase
from autotrain_mem.training.guard.batch_split import Piece, count, joined
from autotrain_mem.training.guard.context import REPEATED, GuardContext
from autotrain_mem.training.guard.loss_weights import Rule, logged_basis, rule_of
from autotrain_mem.training.guard.metrics_ledger import MetricsLedger
from autotrain_mem.training.guard.micro_step import MicroSteps
from autotrain_mem.training.out_of_memory import Full, attempt


class Prediction(NamedTuple):
    """The result of ``Trainer.prediction_step``."""

    loss: Any
    logits: Any
    labels: Any


class Evaluation:
    """Stands in for ``prediction_step`` of one trainer."""

    def __init__(self, context: GuardContext, micro_steps: MicroSteps) -> None:
        self._context = context
        self._limit = context.limits["evaluate_tokens"]
        self._micro_steps = micro_steps
        self._trainer = context.trainer
        self._prediction_step: Callable[..., Any] = context.trainer.prediction_step
        context.trainer.prediction_step = self.prediction_step

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Prediction:
        """``Trainer.prediction_step``."""
        rule = rule_of(self._trainer, counted=False)
        whole = Piece(inputs=self._trainer._prepare_inputs(inputs), layout=rule.layout)
        metrics = MetricsLedger(self._trainer, "eval")
        answers: list[tuple[Piece, Prediction]] = []
        self._through(whole, rule, metrics, answers, (model, prediction_loss_only, ignore_keys))
        metrics.write(lambda name: logged_basis(self._trainer, name))
        return answers[0][1] if len(answers) == 1 else _together(whole, rule, answers)

    def _through(
        self,
        piece: Piece,
        rule: Rule,
        metrics: MetricsLedger,
        answers: list[tuple[Piece, Prediction]],
        call: tuple[Any, ...],
        *,
        is_repeated: bool = False,
    ) -> None:
        units = 1 if rule.why_not or self._context.why_not else piece.units
        parts = self._limit.parts(piece.tokens, units)
        if parts > 1:
            for part in piece.cut(parts, trim=False):
                self._through(part, rule, metrics, answers, call)
            return
        metrics.begin()
        outcome = attempt(lambda: self._once(piece, *call))
        if not isinstance(outcome, Full):
            self._limit.fitted(piece.tokens)
            metrics.keep(piece, is_last=True)
            answers.append((piece, outcome.value))
            return
        metrics.undo()
        if units < 2 and not is_repeated and not self._context.why_not:
            self._context.report(Phase.EVALUATE, REPEATED, outcome, rows=piece.rows, tokens=piece.tokens)
        else:
            self._make_smaller(piece, units, rule, outcome)
        self._through(piece, rule, metrics, answers, call, is_repeated=units < 2)

    def _once(self, piece: Piece, model: Any, loss_only: bool, ignore_keys: list[str] | None) -> Prediction:
        with self._micro_steps.prepared():
            return Prediction(*self._prediction_step(model, dict(piece.inputs), loss_only, ignore_keys=ignore_keys))

    def _make_smaller(self, piece: Piece, units: int, rule: Rule, full: Full) -> None:
        if units < 2:
            reason = self._context.why_not or rule.why_not or "a single row is too large"
            self._context.give_up(Phase.EVALUATE, full, reason)
        self._limit.failed(piece.tokens)
        sizes = [part.units for part in piece.cut(self._limit.parts(piece.tokens, units), trim=False)]
        remedy = f"split into {' + '.join(map(str, sizes))} {piece.layout}"
        self._context.report(Phase.EVALUATE, remedy, full, rows=piece.rows, tokens=piece.tokens)


def _together(whole: Piece, rule: Rule, answers: list[tuple[Piece, Prediction]]) -> Prediction:
    total = count(whole, rule.evaluate) or 1.0
    loss = None
    if answers[0][1].loss is not None:
        shares = [count(piece, rule.evaluate) / total for piece, _ in answers]
        weighted = [answer.loss * share for share, (_, answer) in zip(shares, answers, strict=True) if share]
        loss = sum(weighted[1:], weighted[0]) if weighted else answers[0][1].loss
    logits = joined([answer.logits for _, answer in answers], rule.layout)
    return Prediction(loss, logits, joined([answer.labels for _, answer in answers], rule.layout))
