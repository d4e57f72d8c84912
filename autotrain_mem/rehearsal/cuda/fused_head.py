"""TRL's fused language-model head as it runs on CUDA, where its tiles are folded by Triton kernels.

TRL 1.16 scores tokens tile by tile (``trl/kernels/chunked_logprob.py: ChunkedLogProbFunction``) in SFT, DPO, GRPO,
RLOO and KTO. On CUDA it scores the positions that have a label and nothing else, its kernels work inside the tile, and
its products are added up in float32 without copies. Without Triton it scores every position, holds half a dozen
float32 copies of each tile, and copies the weights: none of that may reach a record. An older TRL, which has no such
head, is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autotrain_mem.rehearsal.cuda.rules import CudaRule
from autotrain_mem.rehearsal.trace.flops import note
from autotrain_mem.rehearsal.trace.operator_costs import pass_through, product


@contextmanager
def fused_head_stand_ins() -> Iterator[None]:
    """Inside, the fused head of the installed TRL allocates what its Triton path does; real tensors get true values."""
    head = _fused_head()
    if head is None:
        yield
        return
    from trl.trainer import utils

    with (
        patch.object(head, "_use_triton", lambda device: True),
        patch.object(utils, "_use_triton", lambda device: True),
        patch.object(head, "_forward_kernel", _Kernel(head._forward_tile, statistics=slice(3, 10))),
        patch.object(head, "_backward_kernel", _Kernel(head._backward_tile, statistics=slice(0))),
        patch.object(head, "_addmm_fp32", _add_product),
        patch.object(head, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b)), create=True),
    ):
        yield


def _fused_head() -> Any:
    """TRL's module; None where it has none. Apart, so that nothing is rehearsed while its ImportError is handled: all
    that is raised then would have it as its context."""
    try:
        from trl.kernels import chunked_logprob
    except ImportError:
        return None
    return chunked_logprob


class _Kernel:
    """Stands for a jitted kernel: ``kernel[grid](tile, ...)`` writes into its arguments and allocates nothing.

    ``tile`` is the same in PyTorch; beside the tile it writes those of ``statistics``, of which nothing is known
    afterwards where they are fake.
    """

    def __init__(self, tile: Callable[..., None], *, statistics: slice) -> None:
        self._tile, self._statistics = tile, statistics

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        note(pass_through(args[0], args[0]))
        if isinstance(args[0], FakeTensor):
            for statistic in args[self._statistics]:
                statistic.copy_(args[0][0, 0])
            return
        with torch._C._DisableTorchDispatch():
            self._tile(*args, **kwargs)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``_addmm_fp32``: on CUDA ``torch.addmm`` takes half precision and adds in float32, in place."""
    note(product(a.shape[0], a.shape[1], b.shape[1], a.dtype))
    if isinstance(total, FakeTensor):
        total.copy_(a[0, 0])
        return
    with torch._C._DisableTorchDispatch():
        total.addmm_(a.float(), b.float())


RULES = (CudaRule(lambda recorder, card: fused_head_stand_ins()),)
