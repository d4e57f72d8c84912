"""Keeps a PPO rollout going when the device is full: fewer prompts are answered, or completions judged, at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from autotrain_mem.training.full_device import Full, attempt
from autotrain_mem.training.guard.batch_split import split_evenly
from autotrain_mem.training.guard.context import ON_HOST, REPEATED, GuardContext, keep_rng_state
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


Finished = Sequence[torch.Tensor]
"""Parameters whose gradients hold the rows already."""

WorkOnRows = Callable[[slice, Finished], None]


class Parts:
    """Splits the batches of one guarded PPO trainer, and makes the parts smaller after a shortage.

    Args:
        name: The limit of ``context`` that is kept to. PPO evaluates nothing.
    """

    def __init__(self, context: GuardContext, name: Literal["train_tokens", "generate_rows", "score_rows"]) -> None:
        self.limit = context.limits[name]
        self._context = context
        self._counts_tokens = name == "train_tokens"

    def halve(self, phase: Phase, full: Full, rows: int, length: int) -> None:
        """Allow less at once from now on.

        Raises:
            torch.OutOfMemoryError: nothing is left to make smaller.
        """
        context = self._context
        if phase is Phase.BACKWARD and context.gradients.come_in_parts:
            context.give_up(phase, full, "reentrant checkpointing gives gradients in parts")
        if rows == 1 and (context.on_host or not self._counts_tokens):
            context.give_up(phase, full, f"a single row of {length} tokens is too large")
        self.shrink(rows, length)
        if rows > 1:
            remedy = f"split into {(rows + 1) // 2} + {rows // 2} rows"
        else:
            context.on_host = True
            remedy = ON_HOST
        context.report(phase, remedy, full, rows=rows, tokens=rows * length)

    def shrink(self, rows: int, length: int) -> None:
        """Allow fewer than so many rows at once from now on."""
        units = length if self._counts_tokens else 1
        self.limit.failed(rows * units)
        if rows > 1:
            self.limit.most = -(-(self.limit.most or 1) // units) * units  # whole rows: 5 into 3 + 2, not 2 + 2 + 1

    def each(self, phase: Phase, rows: range, length: int, work: WorkOnRows, finished: Finished = ()) -> None:
        """Work on all rows in their order, as many at once as may be; each part is done once, whatever was refused."""
        units, gradients = length if self._counts_tokens else 1, self._context.gradients
        parts = self.limit.parts(len(rows) * units, len(rows))
        if parts == 1:
            gradients.begin()
            full = attempt(lambda: work(slice(rows.start, rows.stop), finished))
            if not isinstance(full, Full):
                self.limit.fitted(len(rows) * units)
                return
            self.halve(phase, full, len(rows), length)
            finished, parts = (*finished, *gradients.done()), min(2, len(rows))
        for part in split_evenly(rows, parts):
            self.each(phase, part, length, work, finished)
