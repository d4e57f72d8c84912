"""What CUDA does otherwise than the CPU, imitated. Each rule with its source.

The rehearsal runs on CPU tensors so that its result is the same everywhere; here is what that would get wrong.
Rules known so far:

- foreach: on CUDA, optimizers and gradient clipping work on lists of tensors at once and hold temporaries for all of
  them together (``torch/optim/optimizer.py: _default_to_fused_or_foreach``, which asks
  ``torch/utils/_foreach_utils.py: _get_foreach_kernels_supported_devices``). On the CPU they go one by one.
- dropout: on CUDA it is one fused kernel that keeps a mask of one byte per element
  (``aten/src/ATen/native/Dropout.cpp: is_fused_kernel_acceptable`` and ``native_dropout``); on the CPU the scaled noise
  is kept, in the input's own dtype.
- attention with dropout: CUDA's fused kernels drop inside the kernel (``aten/src/ATen/native/transformers/cuda/
  attention.cu: _scaled_dot_product_flash_attention_cuda``), while the CPU falls back to whole score matrices
  (``aten/src/ATen/native/transformers/sdp_utils_cpp.h: check_for_dropout``). Attention runs without dropout here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optimizer_module
from torch.utils import _foreach_utils as foreach_module

NOT_IMITATED = (
    "CUDA's autocast policy and the workspaces inside its kernels (cuBLAS, attention backward): on the public runs "
    "that scripts/accuracy compares, peaks without them are within 4 %",
)


def _fused_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """torch.nn.functional.dropout as on CUDA, where ``inplace`` and the trivial cases take the ordinary path."""
    if inplace or not training or p in (0.0, 1.0) or input.numel() == 0:
        return _plain_dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


def _attention_without_dropout(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention on the path that CUDA takes with dropout too."""
    return _plain_attention(query, key, value, attn_mask, 0.0, *args, **kwargs)


_plain_attention = torch.nn.functional.scaled_dot_product_attention
_plain_dropout = torch.nn.functional.dropout


@contextmanager
def cuda_lens() -> Iterator[None]:
    """Make CPU tensors, fake or real, take CUDA's paths. Restores everything on exit."""
    devices = [*foreach_module._get_foreach_kernels_supported_devices(), "cpu"]
    optimizer_types = [*optimizer_module._foreach_supported_types, FakeTensor]
    foreach_types = [*foreach_module._foreach_supported_types, FakeTensor]
    with (
        patch.object(foreach_module, "_get_foreach_kernels_supported_devices", lambda: devices),
        patch.object(optimizer_module, "_get_foreach_kernels_supported_devices", lambda: devices),
        patch.object(optimizer_module, "_foreach_supported_types", optimizer_types),
        patch.object(foreach_module, "_foreach_supported_types", foreach_types),
        patch.object(torch.nn.functional, "dropout", _fused_dropout),
        patch.object(torch.nn.functional, "scaled_dot_product_attention", _attention_without_dropout),
    ):
        yield
