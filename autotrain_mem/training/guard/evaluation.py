"""An evaluation step that runs out of memory is repeated on parts of its batch: the same loss, the same predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from autotrain_mem.spec import Phase
from autotrain_mem.training.guard.backoff import Limit
from autotrain_mem.training.guard.batch_split import Piece, count, joined
from autotrain_mem.training.guard.generation import REPEATED
from autotrain_mem.training.guard.loss_weights import Rule, logged_basis, rule_of
from autotrain_mem.training.guard.metrics_ledger import Books
from autotrain_mem.training.guard.micro_step import MicroSteps
from autotrain_mem.training.out_of_memory import Full, attempt

if TYPE_CHECKING:
    from autotrain_mem.training.guard.attach import Guard


class Prediction(NamedTuple):
    """What ``Trainer.prediction_step`` gives."""

    loss: Any
    logits: Any
    labels: Any


class Evaluation:
    """Stands in for ``prediction_step`` of one trainer.

    Args:
        limit: Tokens, with padding, that are evaluated at once.
    """

    def __init__(self, guard: Guard, micro_steps: MicroSteps, limit: Limit) -> None:
        self.limit = limit
        self._guard = guard
        self._micro_steps = micro_steps
        self._trainer = guard.trainer
        self._prediction_step: Callable[..., Any] = guard.trainer.prediction_step
        guard.trainer.prediction_step = self.prediction_step

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Prediction:
        """``Trainer.prediction_step``."""
        rule = rule_of(self._trainer, counted=False)
        whole = Piece(inputs=self._trainer._prepare_inputs(inputs), layout=rule.layout)
        books = Books(self._trainer, "eval")
        answers: list[tuple[Piece, Prediction]] = []
        self._through(whole, rule, books, answers, (model, prediction_loss_only, ignore_keys))
        books.write(lambda name: logged_basis(self._trainer, rule.family, name))
        return answers[0][1] if len(answers) == 1 else _together(whole, rule, answers)

    def _through(
        self,
        piece: Piece,
        rule: Rule,
        books: Books,
        answers: list[tuple[Piece, Prediction]],
        call: tuple[Any, ...],
        *,
        is_repeated: bool = False,
    ) -> None:
        units = 1 if rule.why_not or self._guard.why_not else piece.units
        parts = self.limit.parts(piece.tokens, units)
        if parts > 1:
            for part in piece.cut(parts, trim=False):
                self._through(part, rule, books, answers, call)
            return
        books.begin()
        outcome = attempt(lambda: self._once(piece, *call))
        if not isinstance(outcome, Full):
            self.limit.fitted(piece.tokens)
            books.keep(piece, is_last=True)
            answers.append((piece, outcome.value))
            return
        books.undo()
        if units < 2 and not is_repeated and not self._guard.why_not:
            self._guard.tell(Phase.EVALUATE, REPEATED, outcome, rows=piece.rows, tokens=piece.tokens)
        else:
            self._make_smaller(piece, units, rule, outcome)
        self._through(piece, rule, books, answers, call, is_repeated=units < 2)

    def _once(self, piece: Piece, model: Any, loss_only: bool, ignore_keys: list[str] | None) -> Prediction:
        with self._micro_steps.prepared():
            return Prediction(*self._prediction_step(model, dict(piece.inputs), loss_only, ignore_keys=ignore_keys))

    def _make_smaller(self, piece: Piece, units: int, rule: Rule, full: Full) -> None:
        if units < 2:
            reason = self._guard.why_not or rule.why_not or "a single row is too large"
            self._guard.give_up(Phase.EVALUATE, full, reason)
        self.limit.failed(piece.tokens)
        sizes = [part.units for part in piece.cut(self.limit.parts(piece.tokens, units), trim=False)]
        remedy = f"split into {' + '.join(map(str, sizes))} {piece.layout}"
        self._guard.tell(Phase.EVALUATE, remedy, full, rows=piece.rows, tokens=piece.tokens)


def _together(whole: Piece, rule: Rule, answers: list[tuple[Piece, Prediction]]) -> Prediction:
    total = count(whole, rule.evaluate) or 1.0
    loss = None
    if answers[0][1].loss is not None:
        shares = [count(piece, rule.evaluate) / total for piece, _ in answers]
        weighted = [answer.loss * share for share, (_, answer) in zip(shares, answers, strict=True) if share]
        loss = sum(weighted[1:], weighted[0]) if weighted else answers[0][1].loss
    logits = joined([answer.logits for _, answer in answers], rule.layout)
    return Prediction(loss, logits, joined([answer.labels for _, answer in answers], rule.layout))
