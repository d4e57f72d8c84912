"""Generating and judging that run out of memory: repeated whole, then in parts.

For GRPO and RLOO, in training and in evaluation. What vLLM or transformers' continuous batching generate lies outside
of this: both keep a pool of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autotrain_mem.spec import Phase
from autotrain_mem.training.guard.backoff import Limit
from autotrain_mem.training.guard.rng_state import Draws
from autotrain_mem.training.out_of_memory import Done, Full, attempt

if TYPE_CHECKING:
    from autotrain_mem.training.guard.attach import Guard

REPEATED = "repeated after the cache was emptied"


class Generation:
    """Stands in for ``generate`` of the policy.

    Args:
        limit: Prompts that are answered at once.
    """

    def __init__(self, guard: Guard, policy: Any, limit: Limit) -> None:
        self.limit = limit
        self._guard = guard
        self._policy = policy
        self._generate: Callable[..., Any] = policy.generate
        policy.generate = self.generate

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``GenerationMixin.generate``. Parts of the prompts draw other samples than all at once would."""
        rows = _rows(kwargs)
        if args or rows is None:
            return self._generate(*args, **kwargs)
        if self.limit.parts(rows, rows) > 1:
            return self._in_parts(kwargs, rows)
        draws = Draws.now()
        first = attempt(lambda: self._generate(**kwargs))
        if isinstance(first, Done):
            self.limit.fitted(rows)
            return first.value
        if self._guard.why_not:
            self._guard.give_up(Phase.GENERATE, first, self._guard.why_not)
        draws.restore()
        second = attempt(lambda: self._generate(**kwargs))
        if isinstance(second, Done):  # free memory lay in pieces: the samples are those of the first try
            self._guard.tell(Phase.GENERATE, REPEATED, first, rows=rows)
            return second.value
        if rows < 2:
            self._guard.give_up(Phase.GENERATE, second, "a single prompt is too large")
        draws.restore()
        self.limit.failed(rows)
        sizes = " + ".join(str(end - start) for start, end in self._bounds(rows))
        remedy = f"answered in {sizes} prompts, which draw other samples than all at once"
        self._guard.tell(Phase.GENERATE, remedy, second, rows=rows)
        return self._in_parts(kwargs, rows)

    def _bounds(self, rows: int) -> list[tuple[int, int]]:
        parts = self.limit.parts(rows, rows)
        edges = [rows * number // parts for number in range(parts + 1)]
        return list(itertools.pairwise(edges))

    def _in_parts(self, kwargs: dict[str, Any], rows: int) -> Any:
        answers = [self.generate(**_part(kwargs, rows, start, end)) for start, end in self._bounds(rows)]
        return _as_long_as_all(answers, self._pad_id(kwargs))

    def _pad_id(self, kwargs: dict[str, Any]) -> int:
        """What ``generate`` itself fills up with."""
        chosen = kwargs.get("generation_config") or self._policy.generation_config
        for value in (kwargs.get("pad_token_id"), chosen.pad_token_id, chosen.eos_token_id):
            if value is not None:
                return int(value[0] if isinstance(value, list) else value)
        return 0


def _rows(kwargs: dict[str, Any]) -> int | None:
    """Of the prompts; None where they come otherwise than TRL's or with images."""
    ids = kwargs.get("input_ids")
    return None if ids is None or "pixel_values" in kwargs else int(ids.shape[0])


def _part(kwargs: dict[str, Any], rows: int, start: int, end: int) -> dict[str, Any]:
    import torch

    def cut(value: Any) -> Any:
        has_rows = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows
        return value[start:end] if has_rows else value

    return {name: cut(value) for name, value in kwargs.items()}


def _as_long_as_all(answers: list[Any], pad_id: int) -> Any:
    import torch

    longest = max(answer.shape[1] for answer in answers)
    pad = torch.nn.functional.pad
    return torch.cat([pad(answer, (0, longest - answer.shape[1]), value=pad_id) for answer in answers])


class Scoring:
    """Stands in for ``_get_per_token_logps_and_entropies`` outside of training: in smaller batches, the same numbers.

    Args:
        limit: Completions that are judged at once.
    """

    def __init__(self, guard: Guard, limit: Limit) -> None:
        self.limit = limit
        self._guard = guard
        self._judge: Callable[..., Any] = guard.trainer._get_per_token_logps_and_entropies
        guard.trainer._get_per_token_logps_and_entropies = self.judge

    def judge(
        self, model: Any, input_ids: Any, mask: Any, logits_to_keep: int, batch_size: int | None = None, **kwargs: Any
    ) -> Any:
        """The trainer's method; with gradients it belongs to a micro-step, which is split as a whole."""
        import torch

        given = (model, input_ids, mask, logits_to_keep)
        rows = int(input_ids.shape[0])
        at_once = min(batch_size or rows, rows)
        if torch.is_grad_enabled() or kwargs.get("compute_aux_loss"):
            return self._judge(*given, batch_size, **kwargs)
        if self.limit.exceeded_by(at_once):
            at_once = -(-at_once // self.limit.parts(at_once, at_once))
        outcome = attempt(lambda: self._judge(*given, at_once, **kwargs))
        if isinstance(outcome, Done):
            self.limit.fitted(at_once)
            return outcome.value
        self._make_smaller(at_once, rows, outcome)
        return self.judge(*given, batch_size, **kwargs)

    def _make_smaller(self, at_once: int, rows: int, full: Full) -> None:
        if at_once < 2 or self._guard.why_not:
            self._guard.give_up(Phase.SCORE, full, self._guard.why_not or "a single completion is too large")
        self.limit.failed(at_once)
        self._guard.tell(Phase.SCORE, f"judged {self.limit.most} completions at a time", full, rows=rows)


class RewardModel:
    """Stands in for the forward of a model that judges: repeated once, when nobody holds what the first try took."""

    def __init__(self, guard: Guard, model: Any) -> None:
        self._guard = guard
        self._forward: Callable[..., Any] = model.forward
        model.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        first = attempt(lambda: self._forward(*args, **kwargs))
        if isinstance(first, Done):
            return first.value
        second = attempt(lambda: self._forward(*args, **kwargs))
        if isinstance(second, Full):
            self._guard.give_up(Phase.SCORE, second, "the reward model has no room for all completions at once")
            raise AssertionError
        self._guard.tell(Phase.SCORE, REPEATED, first)
        return second.value
