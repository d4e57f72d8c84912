"""Repeats a micro-step or an evaluation step that ran out of memory, on parts of its batch.

Each parameter gets exactly the gradient of the whole micro-batch: the parts' losses are weighted so that they add up to
the whole's, and parameters that already had their gradient when a backward pass failed get no more."""

import functools
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from autotrain_mem.methods.interface import Basis
from autotrain_mem.training.cuda_oom import RanOut, attempt, release
from autotrain_mem.training.guard import loss_weights
from autotrain_mem.training.guard.batch_split import Piece, count, joined
from autotrain_mem.training.guard.context import ON_HOST, REPEATED, GuardContext, keep_rng_state
from autotrain_mem.training.guard.metrics_ledger import MetricsLedger
from autotrain_mem.training.guard.ranks import OtherRankFullError
from autotrain_mem.types import Phase

NEFTUNE = (
    "NEFTune draws different noise (of the same size) for the parts of a micro-batch than for the whole. Training "
    "continues, but the gradient is not exactly the same."
)
"""NEFTune draws noise as dropout does; its bound depends on the columns of the embedding's input, so parts keep all
columns (``transformers/integrations/neftune.py: neftune_post_forward_hook``)."""
MEAN_OF_ITS_OWN = (
    "This model's forward ignores num_items_in_batch and averages its loss itself, so the gradient would depend on how "
    "rows are divided into micro-batches. autofit weights each micro-batch by its share of the step instead."
)
DIVISION = "The gradient depends a little on how a step's rows are divided into micro-batches"
TO_KEEP = "To keep a division, give --per_device_train_batch_size and --gradient_accumulation_steps."
UNKNOWN_MEAN = (
    f"{DIVISION}: testing did not show what this model's own loss is a mean over. No micro-batch is split, and all "
    f"micro-batches of a step get the same weight. {TO_KEEP}"
)
IN_PARTS = "gradients arrive in parts (reentrant checkpointing), and it is unknown which of them are complete"


class MicroSteps:
    """Replaces ``training_step``, ``_prepare_inputs`` and ``compute_loss`` of one trainer. ``_prepare_inputs`` runs
    once for each micro-batch, even if the step is repeated: GRPO and RLOO generate in it."""

    def __init__(self, context: GuardContext) -> None:
        trainer = self._trainer = context.trainer
        self.context = context
        self.phase = Phase.FORWARD
        self._gradients = context.gradients
        self.trls_step: Callable[..., Any] = trainer.training_step
        self._prepare_inputs: Callable[..., Any] = trainer._prepare_inputs
        self._compute_loss: Callable[..., Any] = trainer.compute_loss
        self._get_batch_samples: Callable[..., Any] = trainer.get_batch_samples
        self._prepared = False
        self._weight = 1.0
        self._own_loss: loss_weights.OwnLoss | None = None
        self._shared_own_loss: loss_weights.OwnLoss | None = None
        self._batches: Sequence[Any] = ()
        """The micro-batches of this optimizer step."""
        trainer.get_batch_samples = self.get_batch_samples
        trainer.training_step = self.training_step
        trainer._prepare_inputs = self.prepare_inputs
        trainer.compute_loss = self.compute_loss

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self._batches, items = self._get_batch_samples(*args, **kwargs)
        return self._batches, items

    def prepare_inputs(self, inputs: Any) -> Any:
        """Replaces ``Trainer._prepare_inputs``; inputs already prepared are returned unchanged."""
        return inputs if self._prepared else self._prepare_inputs(inputs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the loss of ``Trainer.compute_loss`` times the weight of its part."""
        self.phase = Phase.FORWARD
        with torch.no_grad() if self._weight == 0 else nullcontext():
            result = self._compute_loss(*args, **kwargs)
        self.context.ranks.loss_is_made()
        self._gradients.keep()  # recomputation must save the same tensors as the forward pass
        self.phase = Phase.BACKWARD
        if not torch.is_grad_enabled():
            return result
        loss, *others = result if isinstance(result, tuple) else (result,)
        if self._weight == 0:
            loss = torch.zeros_like(loss)  # a mean over no tokens is NaN
        elif self._weight != 1:
            loss = loss * self._weight
        if not loss.requires_grad:
            loss.requires_grad_()  # all parameters have their gradient already: the backward pass does nothing
        return (loss, *others) if isinstance(result, tuple) else loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()  # as training_step does before it prepares inputs: GRPO checks the mode
        if hasattr(self._trainer.optimizer, "train") and callable(self._trainer.optimizer.train):
            self._trainer.optimizer.train()
        self._gradients.follow(model)
        counted = num_items_in_batch is not None
        layout = loss_weights.rule_of(self._trainer, counted=counted).layout
        whole = Piece(inputs=self._prepare_inputs(inputs), layout=layout, image_token=self.context.image_token)
        metrics = MetricsLedger(self._trainer, "train", self.context.ranks)
        losses: list[Any] = []

        def once(run: InParts, piece: Piece, on_host: bool) -> None:
            weight = share
            if piece is not whole and (basis := run.rule.train) is not Basis.WHOLE:
                weight *= count(piece, basis) / max(count(whole, basis), 1.0)
            inputs = dict(piece.inputs)  # SFT's compute_loss modifies its inputs
            with self.prepared(weight), activations_on_host(model) if on_host else nullcontext():
                losses.append(self.trls_step(model, inputs, num_items_in_batch))

        rule = functools.partial(self.rule, whole, counted=counted)
        run = InParts(self.context, "train_tokens", metrics, once, rule, lambda: self.phase, trains=True)
        has_room = self.context.limits["train_tokens"].most is None
        with self.context.ranks.micro_step(model, has_room=has_room):
            share = self.share_of_step(whole, counted=counted)
            run.through(whole)
            metrics.write(whole)
            self._gradients.begin()  # averaging over ranks must not count as new gradients
        return losses[0] if len(losses) == 1 else sum(losses)

    def rule(self, whole: Piece, *, counted: bool) -> loss_weights.Rule:
        """Returns how to split a batch. If the loss is the model's own, tests it first."""
        return loss_weights.rule_of(self._trainer, counted=counted).as_tried(self.own_loss(whole.inputs))

    def own_loss(self, inputs: Mapping[str, Any]) -> loss_weights.OwnLoss | None:
        """Tests once how the model reduces its labels to a loss; None if the loss is not the model's own."""
        if self._own_loss is None and loss_weights.is_models_loss(self._trainer):
            metrics = MetricsLedger(self._trainer, "eval", self.context.ranks)
            metrics.begin()
            try:
                with self._trainer.compute_loss_context_manager(), self.context.ranks.alone():
                    tried = attempt(lambda: loss_weights.try_loss(self._compute_loss, self._trainer.model, inputs))
            except Exception:  # an unknown model may need more inputs than tokens; the log has the error
                traceback.print_exc()
                self._own_loss = loss_weights.UNKNOWN
            else:
                if isinstance(tried, RanOut):
                    return loss_weights.UNKNOWN  # for now: a later call tests again
                self._own_loss = tried
            finally:
                metrics.undo()
        return self._own_loss

    def share_of_step(self, whole: Piece, *, counted: bool) -> float:
        """Returns the weight of a micro-batch's loss. Weighted losses add up to the loss of a step's rows in one batch.
        The weight is 1 unless the model takes its own mean, since transformers adds up the micro-batches' losses."""
        ranks, steps = self.context.ranks, len(self._batches)
        if steps * ranks.count < 2 or self.context.why_not:
            return 1.0
        if why := loss_weights.why_division_matters(self._trainer, counted=counted):
            self.context.notice(f"{DIVISION}: {why}. {TO_KEEP}")
            return 1.0
        if (own := self._own_loss_of_all(whole)) is None or own.heeds_count:
            return 1.0
        self.context.notice(MEAN_OF_ITS_OWN if own.basis else UNKNOWN_MEAN)
        # transformers multiplies a loss by the number of processes: it assumes a loss divided by all ranks' tokens.
        is_of_all = self._trainer.args.average_tokens_across_devices
        if own.basis is None:
            return 1 / (steps * ranks.count if is_of_all else steps)
        basis = own.basis
        of_step = math.fsum(count(Piece(inputs=batch, layout=whole.layout), basis) for batch in self._batches)
        return count(whole, basis) / max(math.fsum(ranks.gather(of_step)) if is_of_all else of_step, 1.0)

    def _own_loss_of_all(self, whole: Piece) -> loss_weights.OwnLoss | None:
        """Tests how the model reduces its loss; with several ranks, takes the first definite answer."""
        if self.context.ranks.count == 1:
            return self.own_loss(whole.inputs)
        if self._shared_own_loss is None and loss_weights.is_models_loss(self._trainer):
            answers = self.context.ranks.gather(self.own_loss(whole.inputs) or loss_weights.UNKNOWN)
            known = [answer for answer in answers if answer != loss_weights.UNKNOWN]
            self._shared_own_loss = self._own_loss = known[0] if known else loss_weights.UNKNOWN
        return self._shared_own_loss

    def prepared(self, weight: float = 1.0) -> AbstractContextManager[Any]:
        """Within the block, inputs count as already prepared, and the loss has this weight."""
        return patch.multiple(self, _prepared=True, _weight=weight)


def activations_on_host(model: Any) -> AbstractContextManager[Any]:
    """Within the block, TRL offloads activations to the host; on a plain CPU nothing happens."""
    from trl.models import activation_offloading

    if activation_offloading.torch.accelerator.current_accelerator() is None:
        return nullcontext()
    offloading = activation_offloading.OffloadActivations(use_streams=False)
    offloading.update_model_params(model)
    context: AbstractContextManager[Any] = offloading
    return context


class InParts:
    """Processes one prepared batch, whole or in parts, until all of it is done.

    Args:
        once: Processes a piece once; its last argument is True if activations are offloaded to the host. It must not
            store the InParts object, which would put the trainer in a reference cycle.
        rule: Returns how to split the batch; called only before a split, since it may test a model's own loss.
        phase: Returns the phase in which an attempt failed.
        trains: Whether it trains; in evaluation no activations are offloaded, and no columns of padding are dropped.
    """

    def __init__(
        self,
        context: GuardContext,
        limit: str,
        metrics: MetricsLedger,
        once: "Callable[[InParts, Piece, bool], None]",
        rule: Callable[[], loss_weights.Rule],
        phase: Callable[[], Phase],
        *,
        trains: bool,
    ) -> None:
        self._context, self._limit, self._metrics = context, context.limits[limit], metrics
        self._once, self._make_rule, self._phase, self._trains = once, rule, phase, trains
        self._can_wait_on_host = trains and not getattr(context.trainer.args, "activation_offloading", False)

    @functools.cached_property
    def rule(self) -> loss_weights.Rule:
        return self._make_rule()

    def through(self, piece: Piece, *, is_last: bool = True, is_repeated: bool = False) -> None:
        """Processes a piece; ``is_last`` marks the last one of the batch, ``is_repeated`` an unchanged repetition."""
        context, limit, gradients = self._context, self._limit, self._context.gradients
        parts = limit.parts(piece.tokens, self._units(piece)) if limit.exceeded_by(piece.tokens) else 1
        if parts > 1:
            context.ranks.leave()
            has_noise = self._trains and getattr(context.trainer, "neftune_noise_alpha", None) is not None
            if has_noise:
                context.notice(NEFTUNE)
            for number, part in enumerate(piece.cut(parts, trim=self._trains and not has_noise), start=1):
                self.through(part, is_last=is_last and number == parts)
            return
        on_host = context.on_host and self._can_wait_on_host and limit.exceeded_by(piece.tokens)
        restore_rng = keep_rng_state()
        self._metrics.begin()
        gradients.begin()
        if not isinstance(outcome := attempt(lambda: self._once(self, piece, on_host)), RanOut):
            if not on_host:
                limit.fitted(piece.tokens)
            self._metrics.keep(piece, is_last=is_last)
            return
        if context.ranks.has_logged_for_all:
            self._metrics.settle(piece)
        self._metrics.undo()
        with getattr(context.trainer, "maybe_activation_offload_context", nullcontext()):
            pass  # entering the trainer's own offloading frees the tensors that a failed backward left in it
        release()
        restore_rng()
        done = gradients.done()
        context.ranks.leave({id(each) for each in done})
        # With OtherRankFullError this rank had enough memory, and repeats the same piece separately.
        if not isinstance(outcome.error, OtherRankFullError):
            is_repeated = self._make_smaller(piece, outcome, on_host=on_host, is_repeated=is_repeated)
            with gradients.kept(done):
                self.through(piece, is_last=is_last, is_repeated=is_repeated)
            return
        self.through(piece, is_last=is_last)

    def _units(self, piece: Piece) -> int:
        return 1 if self._context.why_not or self.rule.why_not else piece.units

    def _make_smaller(self, piece: Piece, full: RanOut, *, on_host: bool, is_repeated: bool) -> bool:
        """Decides how to make the next attempt smaller, or gives up; returns whether it repeats the piece uncut."""
        context, phase = self._context, self._phase()
        if context.why_not:
            context.give_up(phase, full, context.why_not)
        if self._trains and context.gradients.come_in_parts:
            context.give_up(phase, full, IN_PARTS)
        if (units := self._units(piece)) > 1:
            self._limit.failed(piece.tokens)
            remedy = f"split into {piece.sizes(self._limit.parts(piece.tokens, units))} {piece.layout}"
        elif not on_host and self._can_wait_on_host:
            self._limit.failed(piece.tokens)
            context.on_host = True
            remedy = ON_HOST
        elif not self._trains and not is_repeated:
            remedy = REPEATED
        else:
            context.give_up(phase, full, self.rule.why_not or piece.why_not or "a single row is too large")
        context.report(phase, remedy, full, rows=piece.rows, tokens=piece.tokens)
        return units < 2


class Prediction(NamedTuple):
    """The result of ``Trainer.prediction_step``."""

    loss: Any
    logits: Any
    labels: Any


class Evaluation:
    """Replaces one trainer's ``prediction_step``: a batch in parts gives the same loss and predictions."""

    def __init__(self, context: GuardContext, micro_steps: MicroSteps) -> None:
        self._context = context
        self._micro_steps = micro_steps
        self._trainer = context.trainer
        self._prediction_step: Callable[..., Any] = context.trainer.prediction_step
        context.trainer.prediction_step = self.prediction_step

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Prediction:
        rule = loss_weights.rule_of(self._trainer, counted=False)
        prepared = self._trainer._prepare_inputs(inputs)
        whole = Piece(inputs=prepared, layout=rule.layout, image_token=self._context.image_token)
        metrics = MetricsLedger(self._trainer, "eval", self._context.ranks)
        answers: list[tuple[Piece, Prediction]] = []

        items = None  # the number of tokens that the loss is divided by; all ranks count it together
        if not self._context.why_not and self._context.ranks.count > 1:
            items = self._trainer._get_num_items_in_batch([whole.inputs], self._trainer.args.device)

        def share(run: InParts, piece: Piece) -> float:
            basis = run.rule.evaluate
            return count(piece, basis) / (count(whole, basis) or 1.0)

        def once(run: InParts, piece: Piece, on_host: bool) -> None:
            counted = None if items is None else items * (1.0 if piece is whole else share(run, piece))
            counting = patch.object(self._trainer, "_get_num_items_in_batch", lambda *_: counted)
            with self._micro_steps.prepared(), nullcontext() if counted is None else counting:
                answer = self._prediction_step(model, dict(piece.inputs), prediction_loss_only, ignore_keys=ignore_keys)
            answers.append((piece, Prediction(*answer)))

        split = functools.partial(self._micro_steps.rule, whole, counted=False)
        run = InParts(self._context, "evaluate_tokens", metrics, once, split, lambda: Phase.EVALUATE, trains=False)
        with self._context.ranks.micro_step():
            run.through(whole)
            self._context.ranks.loss_is_made()
            metrics.write(whole)
        if len(answers) == 1:
            return answers[0][1]
        loss, layout = answers[0][1].loss, run.rule.layout
        shares = [share(run, piece) for piece, _ in answers]
        if loss is not None:
            weighted = [answer.loss * weight for (_, answer), weight in zip(answers, shares, strict=True) if weight]
            loss = sum(weighted[1:], weighted[0]) if weighted else loss
        # TRL's chunked loss returns sums over tokens (``trl/trainer/sft_trainer.py: _ChunkedCELMHeadOutput``), Liger's
        # a mean (``liger_kernel/transformers/model/output_classes.py: token_accuracy``).
        sums = getattr(self._trainer.args, "loss_type", None) == "chunked_nll"
        weights = [1] * len(answers) if sums else shares
        logits = joined([answer.logits for _, answer in answers], layout, weights)
        return Prediction(loss, logits, joined([answer.labels for _, answer in answers], layout, weights))
