"""Picks the kernel that CUDA picks for scaled_dot_product_attention, by the facts of torch 2.13.

``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: select_sdp_backend``. What users may switch off
(``torch.backends.cuda.enable_flash_sdp`` and its like) is taken to be on.
"""

from __future__ import annotations

from enum import StrEnum

import torch

Capability = tuple[int, int]

HALF = (torch.float16, torch.bfloat16)


class Backend(StrEnum):
    """A kernel family of ``at::SDPBackend``."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"
    FLASH3 = "flash3"
    """flash-attention 3: asked for by name only, never picked."""


def choose(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    dropout: float,
    is_causal: bool,
    enable_gqa: bool,
    capability: Capability,
) -> Backend:
    """The kernel that CUDA picks: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: select_sdp_backend``.

    cuDNN goes first on capability 9.x and 10.x (``check_prefer_cudnn_attention``: cuDNN newer than 9.15.0, which
    torch's CUDA 13 wheels bring), flash and memory-efficient follow, math takes the rest.
    """
    if not _fits_any_fused(query, key, value, mask):
        return Backend.MATH
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    grouped = enable_gqa and key.size(1) == value.size(1) and query.size(1) % key.size(1) == 0
    equal_heads = query.size(1) == key.size(1) == value.size(1)
    if equal_heads or grouped:
        if _cudnn_runs(query, key, value, mask, dropout, capability):
            return Backend.CUDNN
        if mask is None and _flash_runs(query, key, value, dropout, is_causal, trains, capability):
            return Backend.FLASH
    if equal_heads and _efficient_runs(query, key, value, capability):
        return Backend.EFFICIENT
    return Backend.MATH


def _fits_any_fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """``sdp_utils_cpp.h``: check_tensor_shapes, check_batch_size_and_num_heads_dense, nonzero lengths, last stride."""
    tensors = (query, key, value)
    return (
        all(tensor.dim() == 4 for tensor in tensors)
        and query.size(0) == key.size(0) == value.size(0)
        and all(tensor.size(2) > 0 and tensor.stride(-1) == 1 for tensor in tensors)
        and (mask is None or mask.stride(-1) == 1)
    )


def _cudnn_runs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    capability: Capability,
) -> bool:
    """``can_use_cudnn_attention``. Head sizes above 128 run only with a cuDNN that torch 2.13 does not bring."""
    sizes = (query.size(3), value.size(3))
    return (
        capability[0] in (9, 10)
        and query.dtype in HALF
        and all(size <= 128 and size % 8 == 0 for size in sizes)
        and key.size(2) != 1
        and not (dropout and query.size(2) == 1)
        and (mask is None or _mask_broadcasts(mask, query, key))
    )


def _mask_broadcasts(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool:
    """``sdp_utils_cpp.h: check_attn_mask_shape``."""
    target = (query.size(0), query.size(1), query.size(2), key.size(2))
    return mask.dim() in (2, 4) and all(
        size in (1, full) for size, full in zip(mask.shape, target[-mask.dim() :], strict=True)
    )


def _flash_runs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    is_causal: bool,
    trains: bool,
    capability: Capability,
) -> bool:
    """``can_use_flash_attention``, without the mask."""
    head = query.size(3)
    small_card = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    backward_runs = head <= 192 or (head > 224 and not dropout)
    return (
        (8, 0) <= capability <= (12, 1)
        and query.dtype in HALF
        and head == key.size(3) == value.size(3) <= 256
        and not (is_causal and query.size(2) != key.size(2))
        and (backward_runs or not (trains and small_card))
    )


def _efficient_runs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, capability: Capability) -> bool:
    """``can_use_mem_efficient_attention``; alignment from ``minimum_gemm_alignment``."""
    half = query.dtype in HALF
    alignment = (8 if half else 4) if capability[0] >= 8 else 8 if half and capability[0] == 7 else 1
    dtypes = (*HALF, torch.float32) if capability[0] >= 8 else (torch.float16, torch.float32)
    return (
        (5, 0) <= capability <= (12, 1)
        and query.dtype in dtypes
        and query.size(3) == key.size(3)
        and query.size(3) % alignment == value.size(3) % alignment == 0
    )
