"""Shortens TRL's chunked SFT loss to few chunks, and records its passes and the work of its chunks.

Fewer tokens make fewer chunks, not smaller ones, and each chunk reads the whole LM head. ``estimator.depth`` repeats
the passes for the chunks that are left out, and the rest of the run for the layers that are left out.
"""

import builtins
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from trl.trainer import sft_trainer

from autotrain_mem.rehearsal.trace.flops import Mark
from autotrain_mem.rehearsal.trace.recorder import Recorder, current_recorder
from autotrain_mem.types.model import FEWEST_LOSS_CHUNKS


def are_known() -> bool:
    """Returns whether the installed TRL computes each chunk in ``_chunk``."""
    return hasattr(sft_trainer, "_chunk")


@contextmanager
def with_chunks(chunks: int | None) -> Iterator[list[int]]:
    """Within the block, a loss of many chunks runs only this many of them, including the last; None runs all.

    TRL's SFT loss takes 256 tokens per chunk, with 70 operators forward and backward (``trl/trainer/sft_trainer.py:
    _chunked_cross_entropy_loss``): the 128 chunks of 8 rows of 4096 tokens have more operators than 20 layers.

    Yields:
        The real number of chunks of each shortened loss.
    """
    cut: list[int] = []
    if chunks is None or not are_known():
        yield cut
        return

    def fewer(*bounds: Any) -> Sequence[int]:
        every = builtins.range(*bounds)
        # Of the module's loops, only this one has a tensor as its end: the number of tokens with a label.
        if not any(hasattr(bound, "dtype") for bound in bounds) or len(every) < FEWEST_LOSS_CHUNKS:
            return every
        cut.append(len(every))
        return [*every[: chunks - 1], every[-1]]

    with patch.object(sft_trainer, "range", fewer, create=True):
        yield cut


@contextmanager
def marked_chunks(has_chunks: bool) -> Iterator[None]:
    """Within the block, the recorder gets the passes of TRL's loss over its chunks, and the work of each chunk.

    The loss calls ``_chunk`` once for each chunk, and again when its checkpoint recomputes it. The backward pass over
    the chunks runs between the backward of the loss and that of the hidden states, since autograd runs nodes in reverse
    order of their creation (``torch/csrc/autograd/engine.cpp: CompareNodeTaskTime``).
    """
    if not has_chunks or not are_known():
        yield
        return
    chunk, whole_loss = sft_trainer._chunk, sft_trainer._chunked_cross_entropy_loss
    running: list[_Pass] = []

    def watched_chunk(*args: Any) -> Any:
        for one in running:
            one.chunk_begins()
        return chunk(*args)

    def watched_loss(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if (recorder := current_recorder()) is None:
            return whole_loss(hidden_states, *args, **kwargs)
        running[:] = [_Pass(recorder)]
        results = whole_loss(hidden_states, *args, **kwargs)
        running.pop().end()
        first, after = results[0].grad_fn, hidden_states.grad_fn
        if first is not None and after is not None:  # None in an evaluation
            first.register_prehook(partial(begin_backward, recorder))
            after.register_prehook(end_backward)
        return results

    def begin_backward(recorder: Recorder, gradients: Any) -> None:
        running[:] = [_Pass(recorder)]

    def end_backward(gradients: Any) -> None:
        while running:
            running.pop().end()

    with (
        patch.object(sft_trainer, "_chunk", watched_chunk),
        patch.object(sft_trainer, "_chunked_cross_entropy_loss", watched_loss),
    ):
        yield


class _Pass:
    """Follows one pass over the chunks of a loss."""

    def __init__(self, recorder: Recorder) -> None:
        self._ledger, self._work = recorder.ledger, recorder.work
        self._start, self._operators = len(self._ledger.events), self._ledger.operators
        self._marks: list[Mark] = []

    def chunk_begins(self) -> None:
        self._marks.append(self._work.mark())

    def end(self) -> None:
        self._ledger.add_loss_pass(self._start, len(self._marks), self._ledger.operators - self._operators)
        if self._marks:
            self._work.mark_chunks([*self._marks, self._work.mark()])
