"""Picks the kernel that CUDA picks for scaled_dot_product_attention, by the facts of torch 2.13.

``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: select_sdp_backend``. What users may switch off
(``torch.backends.cuda.enable_flash_sdp`` and its like) is taken to be on.
"""

from __future__ import annotations

from enum import StrEnum

import torch

from autotrain_mem.types.amd import ARCHITECTURES, Architecture
from autotrain_mem.types.hardware import Capability

HALF = (torch.float16, torch.bfloat16)
LARGEST_ALIGNED_HEAD = 256
"""Of ROCm's memory-efficient attention: ``sdp_utils.cpp: check_head_dim_size_flash_nested``."""


class Backend(StrEnum):
    """A kernel family of ``at::SDPBackend``."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"
    FLASH3 = "flash3"
    """flash-attention 3: asked for by name only, never picked."""


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value."""


def choose(
    inputs: Inputs,
    mask: torch.Tensor | None,
    *,
    dropout: float,
    is_causal: bool,
    enable_gqa: bool,
    capability: Capability,
) -> Backend:
    """The kernel that CUDA picks, or ROCm.

    cuDNN goes first on capability 9.x and 10.x (``check_prefer_cudnn_attention``: cuDNN newer than 9.15.0, which
    torch's CUDA 13 wheels bring), flash and memory-efficient follow, math takes the rest.
    """
    if not _fits_any_fused(inputs, mask):
        return Backend.MATH
    if isinstance(capability, str):
        return _choose_of_amd(inputs, mask, ARCHITECTURES[capability], is_causal=is_causal, enable_gqa=enable_gqa)
    query, key, value = inputs
    grouped = enable_gqa and key.size(1) == value.size(1) and query.size(1) % key.size(1) == 0
    equal_heads = query.size(1) == key.size(1) == value.size(1)
    if equal_heads or grouped:
        if _cudnn_runs(inputs, mask, dropout, capability):
            return Backend.CUDNN
        if mask is None and _flash_runs(inputs, dropout, is_causal, capability):
            return Backend.FLASH
    if equal_heads and _efficient_runs(inputs, capability):
        return Backend.EFFICIENT
    return Backend.MATH


def _choose_of_amd(
    inputs: Inputs, mask: torch.Tensor | None, card: Architecture, *, is_causal: bool, enable_gqa: bool
) -> Backend:
    """AOTriton's kernels, under the same two names; cuDNN's are not there (``sdp_utils.cpp``, below ``USE_ROCM``).

    Both take heads of one size up to ``aotriton_max_hdim``. Flash needs half precision and takes grouped heads and no
    mask (``can_use_flash_attention``). Memory-efficient attention takes equal heads, whose size is a multiple of 8, or
    of 4 in float32 (``check_head_dim_size_flash_nested``, which asks for 8 in any case up to AOTriton 0.11), and no
    mask of another dtype than the query's (``can_use_mem_efficient_attention``).
    """
    query, key, value = inputs
    equal_heads = query.size(1) == key.size(1) == value.size(1)
    grouped = enable_gqa and key.size(1) == value.size(1) and query.size(1) % key.size(1) == 0
    if not query.size(3) == key.size(3) == value.size(3) <= card.largest_head:
        return Backend.MATH
    is_square = not is_causal or query.size(2) == key.size(2)
    if mask is None and query.dtype in HALF and is_square and (equal_heads or grouped):
        return Backend.FLASH
    fits_mask = mask is None or mask.dtype in (torch.bool, query.dtype)
    is_aligned = query.size(3) % 8 == 0 and query.size(3) <= LARGEST_ALIGNED_HEAD
    if equal_heads and fits_mask and is_aligned and query.dtype in (*HALF, torch.float32):
        return Backend.EFFICIENT
    return Backend.MATH


def trains(inputs: Inputs) -> bool:
    """Says whether a backward pass may follow."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


def _fits_any_fused(inputs: Inputs, mask: torch.Tensor | None) -> bool:
    """``sdp_utils_cpp.h``: check_tensor_shapes, check_batch_size_and_num_heads_dense, nonzero lengths, last stride."""
    return (
        all(tensor.dim() == 4 and tensor.size(0) == inputs[0].size(0) for tensor in inputs)
        and all(tensor.size(2) > 0 and tensor.stride(-1) == 1 for tensor in inputs)
        and (mask is None or mask.stride(-1) == 1)
    )


def _cudnn_runs(inputs: Inputs, mask: torch.Tensor | None, dropout: float, capability: tuple[int, int]) -> bool:
    """``can_use_cudnn_attention``, and of the mask ``sdp_utils_cpp.h: check_attn_mask_shape``. Head sizes above 128 run
    only with a cuDNN that torch 2.13 does not bring."""
    query, key, value = inputs
    if mask is not None:
        scores = (*query.shape[:3], key.size(2))
        sizes = zip(reversed(mask.shape), reversed(scores), strict=False)
        if mask.dim() not in (2, 4) or any(size not in (1, full) for size, full in sizes):
            return False
    return (
        capability[0] in (9, 10)
        and query.dtype in HALF
        and all(size <= 128 and size % 8 == 0 for size in (query.size(3), value.size(3)))
        and key.size(2) != 1
        and not (dropout and query.size(2) == 1)
    )


def _flash_runs(inputs: Inputs, dropout: float, is_causal: bool, capability: tuple[int, int]) -> bool:
    """``can_use_flash_attention``, without the mask."""
    query, key, value = inputs
    head = query.size(3)
    small_card = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    backward_runs = head <= 192 or (head > 224 and not dropout)
    return (
        (8, 0) <= capability <= (12, 1)
        and query.dtype in HALF
        and head == key.size(3) == value.size(3) <= 256
        and not (is_causal and query.size(2) != key.size(2))
        and (backward_runs or not (small_card and trains(inputs)))
    )


def _efficient_runs(inputs: Inputs, capability: tuple[int, int]) -> bool:
    """``can_use_mem_efficient_attention``; alignment from ``minimum_gemm_alignment``."""
    query, key, value = inputs
    half = query.dtype in HALF
    alignment = (8 if half else 4) if capability[0] >= 8 else 8 if half and capability[0] == 7 else 1
    dtypes = (*HALF, torch.float32) if capability[0] >= 8 else (torch.float16, torch.float32)
    return (
        (5, 0) <= capability <= (12, 1)
        and query.dtype in dtypes
        and query.size(3) == key.size(3)
        and query.size(3) % alignment == value.size(3) % alignment == 0
    )
