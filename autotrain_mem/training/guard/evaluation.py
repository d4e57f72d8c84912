"""Repeats an evaluation step that ran out of memory on parts of its batch: the same loss, the same predictions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

from autotrain_mem.training.guard.batch_split import Piece, count, joined
from autotrain_mem.training.guard.context import GuardContext
from autotrain_mem.training.guard.loss_weights import Rule, rule_of
from autotrain_mem.training.guard.metrics_ledger import MetricsLedger
from autotrain_mem.training.guard.micro_step import InParts, MicroSteps
from autotrain_mem.types import Phase


class Prediction(NamedTuple):
    """The result of ``Trainer.prediction_step``."""

    loss: Any
    logits: Any
    labels: Any


class Evaluation:
    """Replaces ``prediction_step`` of one trainer."""

    def __init__(self, context: GuardContext, micro_steps: MicroSteps) -> None:
        self._context = context
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

        def share(run: InParts, piece: Piece) -> float:
            basis = run.rule.evaluate
            return count(piece, basis) / (count(whole, basis) or 1.0)

        def once(run: InParts, piece: Piece, on_host: bool) -> None:
            counted = None if items is None else items * (1.0 if piece is whole else share(run, piece))
            told = patch.object(self._trainer, "_get_num_items_in_batch", lambda *_: counted)
            with self._micro_steps.prepared(), nullcontext() if counted is None else told:
                answer = self._prediction_step(model, dict(piece.inputs), prediction_loss_only, ignore_keys=ignore_keys)
            answers.append((piece, Prediction(*answer)))

        def rule_of_whole() -> Rule:
            return self._micro_steps.rule(whole, counted=False)

        run = InParts(
            self._context, "evaluate_tokens", metrics, once, rule_of_whole, lambda: Phase.EVALUATE, trains=False
        )
        with self._context.ranks.micro_step():
            run.through(whole)
            self._context.ranks.loss_is_made()
            metrics.write(whole)
        if len(answers) == 1:
            return answers[0][1]
        loss, layout = answers[0][1].loss, run.rule.layout
        if loss is not None:
            shares = [(answer.loss, share(run, piece)) for piece, answer in answers]
            weighted = [each * weight for each, weight in shares if weight]
            loss = sum(weighted[1:], weighted[0]) if weighted else loss
        logits = joined([answer.logits for _, answer in answers], layout)
        return Prediction(loss, logits, joined([answer.labels for _, answer in answers], layout))
