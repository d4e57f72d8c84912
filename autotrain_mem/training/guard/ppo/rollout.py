"""Keeps a PPO rollout going when the device is full: fewer prompts are answered, or completions judged, at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autotrain_mem.training.guard.context import REPEATED, GuardContext, keep_rng_state
from autotrain_mem.training.guard.ppo.batches import Finished, Parts
from autotrain_mem.training.out_of_memory import Full, attempt
from autotrain_mem.types import Phase


@dataclass(frozen=True, slots=True)
class _Logits:
    """All that TRL's loop reads of the reference's output."""

    logits: torch.Tensor


class Rollouts:
    """Stands in for the methods by which one PPO trainer generates and judges."""

    def __init__(self, context: GuardContext) -> None:
        trainer, self._context = context.trainer, context
        self._generated, self._judged = Parts(context, "generate_rows"), Parts(context, "score_rows")
        self._trl_generate, trainer._generate_rollout = trainer._generate_rollout, self.generate
        self._trl_judge, trainer._judge = trainer._judge, self.judge
        self._trl_forward, trainer._forward = trainer._forward, self.forward

    def generate(self, model: Any, queries: torch.Tensor, at_once: int, pad: int, config: Any) -> Any:
        """Generate once more with the same random numbers; then for fewer prompts at once, which draw others."""
        restore_rng, is_repeated = keep_rng_state(), False
        limit, length = self._generated.limit, queries.shape[1] + (config.max_new_tokens or 0)
        wanted = min(at_once, len(queries))
        while True:
            rows = -(-wanted // limit.parts(wanted, wanted))
            rollout = attempt(functools.partial(self._trl_generate, model, queries, rows, pad, config))
            if not isinstance(rollout, Full):
                limit.fitted(rows)
                return rollout.value
            restore_rng()
            if is_repeated:
                self._generated.halve(Phase.GENERATE, rollout, rows, length)
            else:
                self._context.report(Phase.GENERATE, REPEATED, rollout, rows=rows, tokens=rows * length)
            is_repeated = True

    def judge(self, model: Any, rows: torch.Tensor, pad: int, context_length: int) -> Any:
        """Values or rewards, which no row shares with another."""
        scored = self._scored(rows, lambda part: self._trl_judge(model, part, pad, context_length))
        return scored[0] if len(scored) == 1 else tuple(torch.cat(parts) for parts in zip(*scored, strict=True))

    def forward(self, model: Any, rows: torch.Tensor, pad: int) -> Any:
        """The reference's output; the policy's training forward is left as it is."""
        if torch.is_grad_enabled() or model is self._context.trainer.model:
            return self._trl_forward(model, rows, pad)
        scored = self._scored(rows, lambda part: self._trl_forward(model, part, pad))
        return scored[0] if len(scored) == 1 else _Logits(torch.cat([each.logits for each in scored]))

    def _scored(self, rows: torch.Tensor, score: Callable[[torch.Tensor], Any]) -> list[Any]:
        scored: list[Any] = []

        def work(part: slice, _: Finished) -> None:
            scored.append(score(rows[part]))

        self._judged.each(Phase.SCORE, range(len(rows)), rows.shape[1], work)
        return scored
