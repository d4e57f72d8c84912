"""Calls that empty the device's cache reach the record, though there is no device here.

On a machine with CUDA every such call ends in ``torch.cuda.empty_cache``. Here some stop before it. TRL (PPO's loop:
``trl/experimental/utils.py: empty_cache``) and transformers' evaluation call it at once; ``torch_empty_cache_steps``
and ``Accelerator.free_memory`` go through ``accelerate/utils/memory.py: clear_device_cache``, which asks what hardware
there is and does nothing without any. With an Apple or Intel GPU both call that one's ``empty_cache``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from accelerate.utils import memory

from autotrain_mem.rehearsal.trace.recorder import Recorder


@contextmanager
def follow_empty_cache(recorder: Recorder) -> Iterator[None]:
    """Inside, whatever would empty a CUDA device's cache is recorded, once for each call. Restores everything on exit.

    Not followed: transformers' memory metrics (``skip_memory_metrics=False``), which empty the cache between stages
    only where ``torch.cuda.is_available()``.
    """
    with (
        patch.object(torch.cuda, "empty_cache", recorder.empty_cache),
        patch.object(torch.mps, "empty_cache", recorder.empty_cache),
        patch.object(torch.xpu, "empty_cache", recorder.empty_cache),
        patch.object(memory, "is_cuda_available", lambda: True),
    ):
        yield
