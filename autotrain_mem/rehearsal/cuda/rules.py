"""What CUDA does otherwise than the CPU, imitated. Each rule with its source.

The rehearsal runs on CPU tensors so that its result is the same everywhere; here is what that would get wrong.
Three short rules first:

- foreach: on CUDA, optimizers and gradient clipping work on lists of tensors at once and hold temporaries for all of
  them together (``torch/optim/optimizer.py: _default_to_fused_or_foreach``, which asks
  ``torch/utils/_foreach_utils.py: _get_foreach_kernels_supported_devices``). On the CPU they go one by one.
- dropout: on CUDA it is one fused kernel that keeps a mask of one byte per element
  (``aten/src/ATen/native/Dropout.cpp: is_fused_kernel_acceptable`` and ``native_dropout``); on the CPU the scaled noise
  is kept, in the input's own dtype.
- experts: a mixture's grouped product has a fake kernel for bfloat16 only. In other dtypes transformers' own loop over
  the experts stands in (``transformers/integrations/moe.py: _grouped_mm_fallback``), whose results have the same sizes.

Larger rules have modules of their own, all of them composed here: loading, fp16, autocast, attention, bitsandbytes,
offloading to the host, the fused head of newer TRL, and ``empty_cache``. What kernels allocate inside one operator is
told to the recorder (``workspaces``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optimizer_module
from torch.utils import _foreach_utils as foreach_module
from transformers.integrations import moe

from autotrain_mem.rehearsal.cuda import attention, loading, workspaces
from autotrain_mem.rehearsal.cuda.attention import cuda_attention
from autotrain_mem.rehearsal.cuda.autocast import cuda_autocast
from autotrain_mem.rehearsal.cuda.bitsandbytes import cuda_bitsandbytes
from autotrain_mem.rehearsal.cuda.empty_cache import follow_empty_cache
from autotrain_mem.rehearsal.cuda.fp16 import fp16_on_cpu
from autotrain_mem.rehearsal.cuda.fused_head import fused_head_stand_ins
from autotrain_mem.rehearsal.cuda.host_offload import host_offloading
from autotrain_mem.rehearsal.cuda.loading import cuda_loading
from autotrain_mem.rehearsal.trace.recorder import Recorder

Capability = tuple[int, int]


def not_imitated(compute_capability: Capability) -> tuple[str, ...]:
    """What no rehearsal for such a card counts, whatever its settings."""
    return (*workspaces.NOT_COUNTED, *loading.NOT_COUNTED, *attention.not_counted(compute_capability))


def _fused_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """torch.nn.functional.dropout as on CUDA, where ``inplace`` and the trivial cases take the ordinary path."""
    if inplace or not training or p in (0.0, 1.0) or input.numel() == 0:
        return _plain_dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


_plain_dropout = torch.nn.functional.dropout


def _takes_bfloat16(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
    return weight.dtype is torch.bfloat16


@contextmanager
def cuda_lens(recorder: Recorder, compute_capability: Capability) -> Iterator[None]:
    """Make CPU tensors, fake or real, take CUDA's paths: while a trainer is built, and while it trains.

    Restores everything on exit.
    """
    with (
        _foreach(),
        patch.object(torch.nn.functional, "dropout", _fused_dropout),
        patch.object(moe, "_can_use_grouped_mm", _takes_bfloat16),
        fp16_on_cpu(),
        cuda_autocast(),
        cuda_attention(compute_capability),
        cuda_bitsandbytes(),
        fused_head_stand_ins(),
        host_offloading(recorder),
        cuda_loading(recorder),
        follow_empty_cache(recorder),
    ):
        yield


@contextmanager
def _foreach() -> Iterator[None]:
    devices = [*foreach_module._get_foreach_kernels_supported_devices(), "cpu"]
    optimizer_types = [*optimizer_module._foreach_supported_types, FakeTensor]
    foreach_types = [*foreach_module._foreach_supported_types, FakeTensor]
    with (
        patch.object(foreach_module, "_get_foreach_kernels_supported_devices", lambda: devices),
        patch.object(optimizer_module, "_get_foreach_kernels_supported_devices", lambda: devices),
        patch.object(optimizer_module, "_foreach_supported_types", optimizer_types),
        patch.object(foreach_module, "_foreach_supported_types", foreach_types),
    ):
        yield
