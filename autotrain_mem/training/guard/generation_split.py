"""Repeats generation and scoring that ran out of memory: first whole, then in parts.

vLLM and transformers' continuous batching are not covered: both keep a memory pool of their own."""

from collections.abc import Callable
from typing import Any

import torch

from autotrain_mem.training.cuda_oom import RanOut, attempt
from autotrain_mem.training.guard.batch_split import Layout, Piece, has_images
from autotrain_mem.training.guard.context import REPEATED, GuardContext, keep_rng_state
from autotrain_mem.types import Phase


class Generation:
    """Replaces the policy's ``generate``."""

    def __init__(self, context: GuardContext, policy: Any) -> None:
        self._context = context
        self._limit = context.limits["generate_rows"]
        self._policy = policy
        self._generate: Callable[..., Any] = policy.generate
        policy.generate = self.generate

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces ``GenerationMixin.generate``. Generating in parts draws other samples."""
        if args or kwargs.get("input_ids") is None:  # TRL passes prompts as input_ids
            return self._generate(*args, **kwargs)
        whole = Piece(inputs=kwargs, layout=Layout.ROWS, image_token=self._context.image_token)
        rows = whole.rows
        if self._limit.exceeded_by(rows) and whole.units > 1:
            return self._in_parts(whole)
        restore_rng = keep_rng_state()
        if not isinstance(first := attempt(lambda: self._generate(**kwargs)), RanOut):
            self._limit.fitted(rows)
            return first
        if self._context.why_not:
            self._context.give_up(Phase.GENERATE, first, self._context.why_not)
        restore_rng()
        second = attempt(lambda: self._generate(**kwargs))
        if not isinstance(second, RanOut):  # memory was fragmented; the samples are as if the first attempt had worked
            self._context.report(Phase.GENERATE, REPEATED, first, rows=rows)
            return second
        if whole.units < 2:
            self._context.give_up(Phase.GENERATE, second, whole.why_not or "a single prompt is too large")
        restore_rng()
        self._limit.failed(rows)
        sizes = whole.sizes(self._limit.parts(rows, whole.units))
        remedy = f"generated for {sizes} prompts separately, which draws other samples than one call for all"
        self._context.report(Phase.GENERATE, remedy, second, rows=rows)
        return self._in_parts(whole)

    def _in_parts(self, whole: Piece) -> Any:
        """Generates for one part of the prompts after another, and pads all completions to the longest."""
        parts = whole.cut(self._limit.parts(whole.rows, whole.units), trim=False)
        answers = [self.generate(**part.inputs) for part in parts]
        chosen = whole.inputs.get("generation_config") or self._policy.generation_config
        given = (whole.inputs.get("pad_token_id"), chosen.pad_token_id, chosen.eos_token_id)
        pad_id = next((each for each in given if each is not None), 0)  # the one that ``generate`` itself pads with
        pad_id = pad_id[0] if isinstance(pad_id, list) else pad_id
        longest, pad = max(answer.shape[1] for answer in answers), torch.nn.functional.pad
        return torch.cat([pad(answer, (0, longest - answer.shape[1]), value=pad_id) for answer in answers])


class Scoring:
    """Replaces ``_get_per_token_logps_and_entropies`` outside of training: smaller batches give the same numbers."""

    def __init__(self, context: GuardContext) -> None:
        self._context = context
        self._limit = context.limits["score_rows"]
        self._judge: Callable[..., Any] = context.trainer._get_per_token_logps_and_entropies
        context.trainer._get_per_token_logps_and_entropies = self.judge

    def judge(
        self, model: Any, input_ids: Any, mask: Any, logits_to_keep: int, batch_size: int | None = None, **kwargs: Any
    ) -> Any:
        """Replaces the trainer's method. A call with gradients is passed on, since its micro-step is split instead."""
        given = (model, input_ids, mask, logits_to_keep)
        rows = int(input_ids.shape[0])
        at_once = min(batch_size or rows, rows)
        if torch.is_grad_enabled() or kwargs.get("compute_aux_loss"):
            return self._judge(*given, batch_size, **kwargs)
        whole = Piece(
            inputs={"input_ids": input_ids, "attention_mask": mask, **kwargs},
            layout=Layout.ROWS,
            image_token=self._context.image_token,
        )
        if self._limit.exceeded_by(at_once) and not whole.why_not:
            at_once = -(-at_once // self._limit.parts(at_once, at_once))
        restore_rng = keep_rng_state()
        if has_images(kwargs) and at_once < min(batch_size or rows, rows):
            outcome = attempt(lambda: self._in_parts(model, whole, logits_to_keep, -(-rows // at_once)))
        else:
            outcome = attempt(lambda: self._judge(*given, at_once, **kwargs))
        if not isinstance(outcome, RanOut):
            self._limit.fitted(at_once)
            return outcome
        reason = self._context.why_not or whole.why_not
        if at_once < 2 or reason:
            self._context.give_up(Phase.SCORE, outcome, reason or "a single completion is too large")
        restore_rng()
        self._limit.failed(at_once)
        self._context.report(Phase.SCORE, f"scored {self._limit.most} completions at a time", outcome, rows=rows)
        return self.judge(*given, batch_size, **kwargs)

    def _in_parts(self, model: Any, whole: Piece, logits_to_keep: int, parts: int) -> Any:
        """Scores rows with images in parts. TRL's own batches would pass empty tensors for rows without images."""
        answers = []
        for part in whole.cut(parts, trim=False):
            inputs = dict(part.inputs)
            rows = (inputs.pop("input_ids"), inputs.pop("attention_mask"))
            answers.append(self._judge(model, *rows, logits_to_keep, None, **inputs))
        return tuple(None if values[0] is None else torch.cat(values) for values in zip(*answers, strict=True))
