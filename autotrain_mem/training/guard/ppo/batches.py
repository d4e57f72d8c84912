"""Does the rows of a PPO batch in parts: as many at once as fit, each part once, whatever did not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from autotrain_mem.training.guard.batch_split import split_evenly
from autotrain_mem.training.guard.context import ON_HOST, GuardContext
from autotrain_mem.training.out_of_memory import Full, attempt
from autotrain_mem.types import Phase

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
