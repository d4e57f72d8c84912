"""Does the rows of a PPO batch in parts: as many at once as fit, each part once, whatever did not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch

from autotrain_mem.spec import Phase
from autotrain_mem.training.guard.context import ON_HOST, GuardContext
from autotrain_mem.training.out_of_memory import Full, attempt

LimitedWork = Literal["train_tokens", "generate_rows", "score_rows"]
"""The limits of :class:`GuardContext` that PPO keeps to; it evaluates nothing."""

Finished = Sequence[torch.Tensor]
"""Parameters whose gradients hold the rows already."""

WorkOnRows = Callable[[slice, Finished], None]


class Batches:
    """Splits batches of one guarded PPO trainer, and makes the parts smaller after a shortage."""

    def __init__(self, context: GuardContext) -> None:
        self.context = context

    def halve(self, name: LimitedWork, phase: Phase, rows: int, length: int, full: Full) -> None:
        """Allow less at once from now on.

        Raises:
            torch.OutOfMemoryError: nothing is left to make smaller.
        """
        context = self.context
        if phase is Phase.BACKWARD and context.gradients.come_in_parts:
            context.give_up(phase, full, "reentrant checkpointing gives gradients in parts")
        if rows == 1 and (context.on_host or name != "train_tokens"):
            context.give_up(phase, full, f"a single row of {length} tokens is too large")
        self.shrink(name, rows, length)
        if rows > 1:
            remedy = f"split into {(rows + 1) // 2} + {rows // 2} rows"
        else:
            context.on_host = True
            remedy = ON_HOST
        context.report(phase, remedy, full, rows=rows, tokens=rows * length)

    def shrink(self, name: LimitedWork, rows: int, length: int) -> None:
        """Allow fewer than so many rows at once from now on."""
        units, limit = _units(name, length), self.context.limits[name]
        limit.failed(rows * units)
        if rows > 1:
            limit.most = -(-(limit.most or 1) // units) * units  # whole rows: 5 are cut into 3 + 2, not 2 + 2 + 1

    def in_parts(
        self, name: LimitedWork, phase: Phase, length: int, rows: range, work: WorkOnRows, finished: Finished = ()
    ) -> None:
        """Work on all rows in their order, as many at once as may be; each part is done once, whatever was refused."""
        limit, units, gradients = self.context.limits[name], _units(name, length), self.context.gradients
        parts = limit.parts(len(rows) * units, len(rows))
        if parts == 1:
            gradients.begin()
            full = attempt(lambda: work(slice(rows.start, rows.stop), finished))
            if not isinstance(full, Full):
                limit.fitted(len(rows) * units)
                return
            self.halve(name, phase, len(rows), length, full)
            finished, parts = (*finished, *gradients.done()), min(2, len(rows))
        for part in _split(rows, parts):
            self.in_parts(name, phase, length, part, work, finished)


def _units(name: LimitedWork, length: int) -> int:
    """Tokens of a row where tokens are limited, else one."""
    return length if name == "train_tokens" else 1


def _split(rows: range, parts: int) -> Iterator[range]:
    """Cut rows into parts, the larger ones first: 5 rows in 2 parts are 3 + 2."""
    size, longer = divmod(len(rows), parts)
    start = rows.start
    for number in range(parts):
        stop = start + size + (number < longer)
        yield range(start, stop)
        start = stop
