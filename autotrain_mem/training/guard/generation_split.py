"""Repeats generating and judging that ran out of memory: whole, then in parts.

For GRPO, RLOO and distillation, in training and in evaluation. What vLLM or transformers' continuous batching generate
lies outside of this: both keep a pool of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from autotrain_mem.training.cuda_oom import Completed, attempt
from autotrain_mem.training.guard.batch_split import Layout, Piece
from autotrain_mem.training.guard.context import REPEATED, GuardContext, keep_rng_state
from autotrain_mem.training.guard.image_split import RowsImages, has_images, images_of_rows
from autotrain_mem.types import Phase


class Generation:
    """Replaces ``generate`` of the policy."""

    def __init__(self, context: GuardContext, policy: Any) -> None:
        self._context = context
        self._limit = context.limits["generate_rows"]
        self._policy = policy
        self._generate: Callable[..., Any] = policy.generate
        policy.generate = self.generate

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``GenerationMixin.generate``. Parts of the prompts draw other samples than all at once would."""
        if args or kwargs.get("input_ids") is None:  # not as TRL gives prompts
            return self._generate(*args, **kwargs)
        rows = int(kwargs["input_ids"].shape[0])
        if self._limit.parts(rows, rows) > 1 and not isinstance(images := self._images(kwargs), str):
            return self._in_parts(kwargs, rows, images)
        restore_rng = keep_rng_state()
        first = attempt(lambda: self._generate(**kwargs))
        if isinstance(first, Completed):
            self._limit.fitted(rows)
            return first.value
        if self._context.why_not:
            self._context.give_up(Phase.GENERATE, first, self._context.why_not)
        restore_rng()
        second = attempt(lambda: self._generate(**kwargs))
        if isinstance(second, Completed):  # free memory lay in pieces: the samples are those of the first try
            self._context.report(Phase.GENERATE, REPEATED, first, rows=rows)
            return second.value
        images = self._images(kwargs)
        if rows < 2 or isinstance(images, str):
            reason = images if rows > 1 else "a single prompt is too large"
            self._context.give_up(Phase.GENERATE, second, str(reason))
        restore_rng()
        self._limit.failed(rows)
        sizes = " + ".join(str(end - start) for start, end in self._bounds(rows))
        remedy = f"answered in {sizes} prompts, which draw other samples than all at once"
        self._context.report(Phase.GENERATE, remedy, second, rows=rows)
        return self._in_parts(kwargs, rows, images)

    def _images(self, kwargs: dict[str, Any]) -> RowsImages | str | None:
        """Returns which images are of which prompts, or why that is not certain; None where there are none."""
        return images_of_rows(kwargs, self._context.image_token) if has_images(kwargs) else None

    def _bounds(self, rows: int) -> list[tuple[int, int]]:
        parts = self._limit.parts(rows, rows)
        edges = [rows * number // parts for number in range(parts + 1)]
        return list(itertools.pairwise(edges))

    def _in_parts(self, kwargs: dict[str, Any], rows: int, images: RowsImages | None) -> Any:
        """Generates for one part of the prompts after another, and pads all completions to the longest."""

        def cut(value: Any, start: int, end: int) -> Any:
            has_rows = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows
            return value[start:end] if has_rows else value

        answers = []
        for bounds in self._bounds(rows):
            apart = {} if images is None else images.of_part(kwargs, [range(*bounds)])
            by_rows = {name: cut(value, *bounds) for name, value in kwargs.items() if name not in apart}
            answers.append(self.generate(**by_rows, **{name: each for name, each in apart.items() if each is not None}))
        longest, pad_id = max(answer.shape[1] for answer in answers), self._pad_id(kwargs)
        pad = torch.nn.functional.pad
        return torch.cat([pad(answer, (0, longest - answer.shape[1]), value=pad_id) for answer in answers])

    def _pad_id(self, kwargs: dict[str, Any]) -> int:
        """The id that ``generate`` itself fills up with."""
        chosen = kwargs.get("generation_config") or self._policy.generation_config
        for value in (kwargs.get("pad_token_id"), chosen.pad_token_id, chosen.eos_token_id):
            if value is not None:
                return int(value[0] if isinstance(value, list) else value)
        return 0


class Scoring:
    """Replaces ``_get_per_token_logps_and_entropies`` outside of training: smaller batches, the same numbers."""

    def __init__(self, context: GuardContext) -> None:
        self._context = context
        self._limit = context.limits["score_rows"]
        self._judge: Callable[..., Any] = context.trainer._get_per_token_logps_and_entropies
        context.trainer._get_per_token_logps_and_entropies = self.judge

    def judge(
        self, model: Any, input_ids: Any, mask: Any, logits_to_keep: int, batch_size: int | None = None, **kwargs: Any
    ) -> Any:
        """The trainer's method; with gradients it belongs to a micro-step, which is split as a whole."""
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
        if has_images(kwargs) and at_once < min(batch_size or rows, rows):
            outcome = attempt(lambda: self._in_parts(model, whole, logits_to_keep, -(-rows // at_once)))
        else:
            outcome = attempt(lambda: self._judge(*given, at_once, **kwargs))
        if isinstance(outcome, Completed):
            self._limit.fitted(at_once)
            return outcome.value
        reason = self._context.why_not or whole.why_not
        if at_once < 2 or reason:
            self._context.give_up(Phase.SCORE, outcome, reason or "a single completion is too large")
        self._limit.failed(at_once)
        self._context.report(Phase.SCORE, f"judged {self._limit.most} completions at a time", outcome, rows=rows)
        return self.judge(*given, batch_size, **kwargs)

    def _in_parts(self, model: Any, whole: Piece, logits_to_keep: int, parts: int) -> Any:
        """Judges rows with images. TRL would give a model empty tensors where the rows of a part have none."""
        answers = []
        for part in whole.cut(parts, trim=False):
            inputs = dict(part.inputs)
            rows = (inputs.pop("input_ids"), inputs.pop("attention_mask"))
            answers.append(self._judge(model, *rows, logits_to_keep, None, **inputs))
        return tuple(None if values[0] is None else torch.cat(values) for values in zip(*answers, strict=True))
