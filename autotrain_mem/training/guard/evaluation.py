"""Repeats an evaluation step that ran out of memory on parts of its batch: the same loss, the same predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from autotrain_mem.training.full_device import Full, attempt
from autotrain_mem.training.guard.batch_split import Piece, count, joined
from autotrain_mem.training.guard.context import REPEATED, GuardContext
from autotrain_mem.training.guard.loss_weights import Rule, rule_of
from autotrain_mem.training.guard.metrics_ledger import MetricsLedger
from autotrain_mem.training.guard.micro_step import MicroSteps
from autotrain_mem.training.guard.ranks import OtherRankFullError
from autotrain_mem.types import Phase


class Prediction(NamedTuple):
    """The result of ``Trainer.prediction_step``."""

    loss: Any
    logits: Any
    labels: Any


Once = Callable[[Piece], None]
"""Evaluates a piece, and keeps its answer."""


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
        rule = rule_of(self._trainer, counted=False)
        prepared = self._trainer._prepare_inputs(inputs)
        whole = Piece(inputs=prepared, layout=rule.layout, image_token=self._context.image_token)
        metrics = MetricsLedger(self._trainer, "eval", self._context.ranks)
        answers: list[tuple[Piece, Prediction]] = []

        items = None  # the tokens by which the loss is divided, which all ranks count together before each forward
        if not self._context.why_not and self._context.ranks.count > 1:
            items = self._trainer._get_num_items_in_batch([whole.inputs], self._trainer.args.device)

        def once(piece: Piece) -> None:
            share = 1.0 if piece is whole else self._share(whole, piece)
            with self._micro_steps.prepared(), self._counted(None if items is None else items * share):
                answer = self._prediction_step(model, dict(piece.inputs), prediction_loss_only, ignore_keys=ignore_keys)
            answers.append((piece, Prediction(*answer)))

        with self._context.ranks.micro_step():
            self._through(whole, metrics, once)
            self._context.ranks.loss_is_made()
            metrics.write(whole)
        if len(answers) == 1:
            return answers[0][1]
        return _together(self._rule(whole), answers, [self._share(whole, piece) for piece, _ in answers])

    @contextmanager
    def _counted(self, items: Any) -> Iterator[None]:
        """Inside, ``prediction_step`` is told these tokens, and gathers none."""
        if items is None:
            yield
            return
        held = vars(self._trainer)
        before = held.get("_get_num_items_in_batch")
        held["_get_num_items_in_batch"] = lambda *_: items
        try:
            yield
        finally:
            del held["_get_num_items_in_batch"]
            if before is not None:
                held["_get_num_items_in_batch"] = before

    def _share(self, whole: Piece, piece: Piece) -> float:
        basis = self._rule(whole).evaluate
        return count(piece, basis) / (count(whole, basis) or 1.0)

    def _rule(self, piece: Piece) -> Rule:
        return self._micro_steps.rule(piece, counted=False)

    def _through(self, piece: Piece, metrics: MetricsLedger, once: Once, *, is_repeated: bool = False) -> None:
        if self._limit.exceeded_by(piece.tokens):
            parts = self._limit.parts(piece.tokens, 1 if self._why_not(piece) else piece.units)
            if parts > 1:
                self._context.ranks.leave()
                for part in piece.cut(parts, trim=False):
                    self._through(part, metrics, once)
                return
        metrics.begin()
        outcome = attempt(lambda: once(piece))
        if not isinstance(outcome, Full):
            self._limit.fitted(piece.tokens)
            metrics.keep(piece, is_last=True)
            return
        ranks = self._context.ranks
        if ranks.has_logged_for_all:
            metrics.settle(piece)
        metrics.undo()
        if isinstance(outcome.error, OtherRankFullError):
            self._through(piece, metrics, once)
            return
        ranks.leave()
        why_not = self._why_not(piece)
        units = 1 if why_not else piece.units
        if units > 1:
            self._limit.failed(piece.tokens)
            remedy = piece.cut_in_words(self._limit.parts(piece.tokens, units))
        elif is_repeated or self._context.why_not:
            reason = why_not or piece.why_not or "a single row is too large"
            self._context.give_up(Phase.EVALUATE, outcome, reason)
        else:
            remedy = REPEATED
        self._context.report(Phase.EVALUATE, remedy, outcome, rows=piece.rows, tokens=piece.tokens)
        self._through(piece, metrics, once, is_repeated=units < 2)

    def _why_not(self, piece: Piece) -> str | None:
        return self._context.why_not or self._rule(piece).why_not


def _together(rule: Rule, answers: list[tuple[Piece, Prediction]], shares: list[float]) -> Prediction:
    loss = None
    if answers[0][1].loss is not None:
        weighted = [answer.loss * share for share, (_, answer) in zip(shares, answers, strict=True) if share]
        loss = sum(weighted[1:], weighted[0]) if weighted else answers[0][1].loss
    logits = joined([answer.logits for _, answer in answers], rule.layout)
    return Prediction(loss, logits, joined([answer.labels for _, answer in answers], rule.layout))
