"""Repeats generating and judging that ran out of memory: whole, then in parts.

For GRPO and RLOO, in training and in evaluation. What vLLM or transformers' continuous batching generate lies outside
of this: both keep a pool of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from autotrain_mem.spec import Phase
from autotrain_mem.training.guard.context import REPEATED, GuardContext, keep_rng_state
from autotrain_mem.training.out_of_memory import Done, Full, attempt


class Generation:
    """Stands in for ``generate`` of the policy."""

    def __init__(self, context: GuardContext, policy: Any) -> None:
        self._context = context
        self._limit = context.limits["generate_rows"]
        self._policy = policy
        self._generate: Callable[..., Any] = policy.generate
        policy.generate = self.generate

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``GenerationMixin.generate``. Parts of the prompts draw other samples than all at once would."""
        if args or kwargs.get("input_ids") is None or "pixel_values" in kwargs:  # not as TRL gives prompts; images
            return self._generate(*args, **kwargs)
        rows = int(kwargs["input_ids"].shape[0])
        if self._limit.parts(rows, rows) > 1:
            return self._in_parts(kwargs, rows)
        restore_rng = keep_rng_state()
        first = attempt(lambda: self._generate(**kwargs))
        if isinstance(first, Done):
            self._limit.fitted(rows)
            return first.value
        if self._context.why_not:
            self._context.give_up(Phase.GENERATE, first, self._context.why_not)
        restore_rng()
        second = attempt(lambda: self._generate(**kwargs))
        if isinstance(second, Done):  # free memory lay in pieces: the samples are those of the first try
            self._context.report(Phase.GENERATE, REPEATED, first, rows=rows)
            return second.value
        if rows < 2:
            self._context.give_up(Phase.GENERATE, second, "a single prompt is too large")
        restore_rng()
        self._limit.failed(rows)
        sizes = " + ".join(str(end - start) for start, end in self._bounds(rows))
        remedy = f"answered in {sizes} prompts, which draw other samples than all at once"
        self._context.report(Phase.GENERATE, remedy, second, rows=rows)
        return self._in_parts(kwargs, rows)

    def _bounds(self, rows: int) -> list[tuple[int, int]]:
        parts = self._limit.parts(rows, rows)
        edges = [rows * number // parts for number in range(parts + 1)]
        return list(itertools.pairwise(edges))

    def _in_parts(self, kwargs: dict[str, Any], rows: int) -> Any:
        """Answer some prompts after the others, and make all answers as long as the longest."""

        def cut(value: Any, start: int, end: int) -> Any:
            has_rows = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows
            return value[start:end] if has_rows else value

        parts = [{name: cut(value, *bounds) for name, value in kwargs.items()} for bounds in self._bounds(rows)]
        answers = [self.generate(**part) for part in parts]
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
    """Stands in for ``_get_per_token_logps_and_entropies`` outside of training: smaller batches, the same numbers."""

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
        if self._limit.exceeded_by(at_once):
            at_once = -(-at_once // self._limit.parts(at_once, at_once))
        outcome = attempt(lambda: self._judge(*given, at_once, **kwargs))
        if isinstance(outcome, Done):
            self._limit.fitted(at_once)
            return outcome.value
        if at_once < 2 or self._context.why_not:
            self._context.give_up(Phase.SCORE, outcome, self._context.why_not or "a single completion is too large")
        self._limit.failed(at_once)
        self._context.report(Phase.SCORE, f"judged {self._limit.most} completions at a time", outcome, rows=rows)
        return self.judge(*given, batch_size, **kwargs)


def guard_reward_model(context: GuardContext, model: Any) -> None:
    """Have the forward of a model that judges repeated once, when nobody holds what the first try took."""
    own_forward: Callable[..., Any] = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        first = attempt(lambda: own_forward(*args, **kwargs))
        if isinstance(first, Done):
            return first.value
        second = attempt(lambda: own_forward(*args, **kwargs))
        if isinstance(second, Full):
            context.give_up(Phase.SCORE, second, "the reward model has no room for all completions at once")
        context.report(Phase.SCORE, REPEATED, first)
        return second.value

    model.forward = forward
