"""DistributedDataParallel on CPU tensors, with a group that may not be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.parallel import distributed

from autotrain_mem.rehearsal.ranks.recording import RankRecorder
from autotrain_mem.types import Owner


class _KeepsBuckets:
    """The C++ reducer without its rebuilding of the buckets after the first step, which reads an order that it wrote
    into a tensor (``reducer.cpp: rebuild_buckets``). Those rebuilt hold the same bytes, in the order in which the
    gradients came."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def _reduced(bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hand a bucket back: the fake group's all-reduce has no result, and the reducer waits for one."""
    torch.distributed.all_reduce(bucket.buffer())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@contextmanager
def ddp_rules(recorder: RankRecorder, *, is_fake: bool) -> Iterator[None]:
    """Inside, DDP wraps models on fake tensors. Shapes are alike on all ranks, so that nobody needs to compare them.

    Args:
        is_fake: The group is not there.
    """
    wrap = distributed.DistributedDataParallel.__init__

    def init(model: Any, *args: Any, **kwargs: Any) -> None:
        with recorder.owned(Owner.GRADIENTS, "ddp_buckets"):
            wrap(model, *args, **kwargs)
        if is_fake:
            model.register_comm_hook(None, lambda state, bucket: _reduced(bucket))
            model.reducer = _KeepsBuckets(model.reducer)

    with (
        # It reads the shapes of all ranks as bytes, in C++, which a fake tensor has none of.
        patch.object(distributed, "_verify_param_shape_across_processes", lambda *_, **__: True),
        patch.object(distributed.DistributedDataParallel, "__init__", init),
    ):
        yield
