"""Keeps what the longest rows left in torch's caching allocator: evaluation within a training does not give it back.

The longest rows run first, and every later batch finds room in the segments that they left. Emptied, the cache grows
again from batches of any order, in pieces that do not fit the next (``estimator.mixed_lengths``). An allocation that
fails gives the cache back by itself (``c10/cuda/CUDACachingAllocator.cpp: malloc``, ``release_cached_blocks``), so that
no evaluation lacks what it does not empty.

Not touched, since memory outside the allocator or the user's own word is the reason: TRL before it wakes a colocated
vLLM engine (``trl/generation/vllm_generation.py``), its PPO loop, its activation offloading beside bitsandbytes
(``trl/models/activation_offloading.py: __enter__``), ``torch_empty_cache_steps``, code of the user's own such as
``compute_metrics``, and what this project does once a device is full. Saving empties nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import Trainer


def keep_cache_in_evaluation(trainer: Any) -> None:
    """Has the evaluations of this trainer keep the cache, with ``eval_accumulation_steps`` and ``batch_eval_metrics``
    too. For a run and for its rehearsal, whose events are then the same."""
    evaluation_loop = trainer.evaluation_loop

    @functools.wraps(evaluation_loop)
    def keeps_cache(*args: Any, **kwargs: Any) -> Any:
        with _kept_from_transformers():
            return evaluation_loop(*args, **kwargs)

    trainer.evaluation_loop = keeps_cache


@contextmanager
def _kept_from_transformers() -> Iterator[None]:
    """Inside, ``torch.cuda.empty_cache`` does nothing where transformers' loop itself calls it, and what it always does
    for everybody whom the loop calls."""
    loop, empty_cache = inspect.unwrap(Trainer.evaluation_loop).__code__, torch.cuda.empty_cache

    def unless_loop() -> None:
        if sys._getframe(1).f_code is not loop:
            empty_cache()

    with patch.object(torch.cuda, "empty_cache", unless_loop):
        yield
