"""Picks the kernel that CUDA picks for scaled_dot_product_attention in torch 2.13, and allocates its buffers.

Source: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: select_sdp_backend``, with every backend enabled.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

import torch
from torch import Tensor

from autotrain_mem.types.hardware import Capability

HALF = (torch.float16, torch.bfloat16)
CUDNN_CAPABILITIES = (9, 10)
"""The major compute capabilities on which torch prefers cuDNN (``sdp_utils.cpp: check_prefer_cudnn_attention``)."""


class Backend(StrEnum):
    """Names a family of kernels, as ``at::SDPBackend`` does."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"
    FLASH3 = "flash3"
    """flash-attention 3, which runs only if it is requested by name."""


Inputs = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""


def choose(
    inputs: Inputs, mask: Tensor | None, *, dropout: float, is_causal: bool, enable_gqa: bool, capability: Capability
) -> Backend:
    """Returns the first kernel that can run, in CUDA's order. cuDNN comes first on capability 9.x and 10.x:
    ``check_prefer_cudnn_attention`` requires a cuDNN newer than 9.15.0, which torch's CUDA 13 wheels include."""
    # sdp_utils_cpp.h: check_tensor_shapes, check_batch_size_and_num_heads_dense, nonzero lengths, last stride
    if any(tensor.dim() != 4 or tensor.size(0) != inputs[0].size(0) for tensor in inputs):
        return Backend.MATH
    if any(tensor.size(2) == 0 or tensor.stride(-1) != 1 for tensor in inputs):
        return Backend.MATH
    if mask is not None and mask.stride(-1) != 1:
        return Backend.MATH
    query, key, value = inputs
    equal_heads = query.size(1) == key.size(1) == value.size(1)
    are_shared = equal_heads or (enable_gqa and key.size(1) == value.size(1) and query.size(1) % key.size(1) == 0)
    if are_shared:
        if _cudnn_runs(inputs, mask, dropout, capability):
            return Backend.CUDNN
        if mask is None and _flash_runs(inputs, dropout, is_causal, capability):
            return Backend.FLASH
    return Backend.EFFICIENT if equal_heads and _efficient_runs(inputs, capability) else Backend.MATH


def trains(inputs: Inputs) -> bool:
    """Returns whether a backward pass may follow."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


def _cudnn_runs(inputs: Inputs, mask: Tensor | None, dropout: float, capability: tuple[int, int]) -> bool:
    """Follows ``can_use_cudnn_attention`` and, for the mask, ``sdp_utils_cpp.h: check_attn_mask_shape``."""
    query, key, value = inputs
    if mask is not None:
        scores = (*query.shape[:3], key.size(2))
        sizes = zip(reversed(mask.shape), reversed(scores), strict=False)
        if mask.dim() not in (2, 4) or any(size not in (1, full) for size, full in sizes):
            return False
    return (
        capability[0] in CUDNN_CAPABILITIES
        and query.dtype in HALF
        # larger heads need a cuDNN that torch 2.13 does not include
        and all(size <= 128 and size % 8 == 0 for size in (query.size(3), value.size(3)))
        and key.size(2) != 1
        and not (dropout and query.size(2) == 1)
    )


def _flash_runs(inputs: Inputs, dropout: float, is_causal: bool, capability: tuple[int, int]) -> bool:
    """Follows ``can_use_flash_attention``, for a call without a mask."""
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
    """Follows ``can_use_mem_efficient_attention`` and ``minimum_gemm_alignment``."""
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


@dataclass(frozen=True, slots=True)
class KernelCall:
    backend: Backend
    capability: Capability
    is_causal: bool = False
    scale: float | None = None
    _: KW_ONLY
    keeps_statistics: bool = True
    """Whether a backward pass may follow, which needs the logsumexp. Flash kernels keep it in any case."""
    ends: Tensor | None = None
    key_ends: Tensor | None = None
    """``cu_seqlens_k`` (``ends``: ``cu_seqlens_q``): starts of a packed row's documents, then its end; else None."""
    window: int | None = None
    """A query attends to keys at a distance below this many tokens; None for all keys."""
    softcap: float = 0.0


Kept = tuple[Tensor, list[Tensor]]
"""The result of a forward pass, and the other tensors that it saves for the backward pass."""
Made = tuple[list[Tensor], list[Tensor]]
"""The gradients of a backward pass, and its scratch buffers."""


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _rows_first(like: Tensor, head_size: int) -> Tensor:
    """Returns an empty B x H x S x D tensor laid out in memory as B x S x H x D."""
    batch, heads, rows, _ = like.shape
    stride = (rows * heads * head_size, head_size, heads * head_size, 1)
    return torch.empty_strided((batch, heads, rows, head_size), stride, dtype=like.dtype)


def _flash_forward(query: Tensor, value: Tensor, call: KernelCall) -> Kept:
    """Follows ``cuda/flash_attn/flash_api.cpp: mha_fwd``. ``hopper/flash_api.cpp`` saves no random generator state."""
    out, logsumexp = torch.empty_like(query), torch.empty(query.shape[:3], dtype=torch.float32)
    return out, [logsumexp] if call.backend is Backend.FLASH3 else [logsumexp, torch.empty(2, dtype=torch.int64)]


def _flash_backward(inputs: Inputs, call: KernelCall) -> Made:
    """Follows ``flash_api.cpp: mha_bwd, mha_varlen_bwd``."""
    query, key, _ = inputs
    grads = [torch.empty_like(tensor) for tensor in inputs]
    batch, heads, rows, head_size = query.shape
    rounded = _round_up(head_size, 32 if head_size <= 128 else 64)
    padded = batch * (_round_up(rows, 128) if call.ends is None else rows)
    if call.ends is not None:
        padded += 128 * (call.ends.shape[0] - 1)
    scratch = [torch.empty(padded * heads * width, dtype=torch.float32) for width in (1, rounded)]
    if key.size(1) != heads:
        scratch += [torch.empty((batch, key.size(2), heads, head_size), dtype=query.dtype) for _ in range(2)]
    return grads, scratch


def _cudnn_forward(query: Tensor, value: Tensor, call: KernelCall) -> Kept:
    """Follows ``aten/src/ATen/native/cudnn/MHA.cpp: run_cudnn_SDP_fprop``."""
    out = torch.empty_like(query) if query.size(3) == value.size(3) else _rows_first(query, value.size(3))
    statistics = [torch.empty(query.shape[:3], dtype=torch.float32)] if call.keeps_statistics else []
    return out, [*statistics, torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)]


def _cudnn_backward(inputs: Inputs, call: KernelCall) -> Made:
    """Follows ``MHA.cpp: run_cudnn_SDP_bprop``. The workspace has row sums, the float32 accumulator of the query's
    gradient, and the gradients of expanded grouped heads (cudnn-frontend:
    ``node/scaled_dot_product_flash_attention.h: CompositeSDPABackwardNode``)."""
    query, key, value = inputs
    grads = [torch.empty_like(tensor) for tensor in inputs]
    elements = query.numel() // query.size(3)
    workspace = 4 * (elements + query.numel())
    if key.size(1) != query.size(1):
        unfolded = query.size(0) * query.size(1) * key.size(2)
        workspace += unfolded * (key.size(3) + value.size(3)) * query.dtype.itemsize
    return grads, [torch.empty(workspace, dtype=torch.uint8)]


def _efficient_forward(query: Tensor, value: Tensor, call: KernelCall) -> Kept:
    """Follows ``cuda/attention.cu: _efficient_attention_forward``. The logsumexp is padded to 32 rows (``kAlignLSE``);
    heads above 128 need a float32 output while the kernel runs (``kNeedsOutputAccumulatorBuffer``)."""
    out = _rows_first(query, value.size(3))
    rows = _round_up(query.size(2), 32) if call.keeps_statistics else 0
    statistics = torch.empty((*query.shape[:2], rows), dtype=torch.float32)
    if max(query.size(3), value.size(3)) > 128 and query.dtype in HALF:
        torch.empty(out.numel(), dtype=torch.float32)
    return out, [statistics]


def _efficient_backward(inputs: Inputs, call: KernelCall) -> Made:
    """Follows ``cuda/attention_backward.cu: _efficient_attention_backward``. In float32 the row sums come from a
    product of the output and its gradient; half-precision kernels compute them without that product."""
    query, _, value = inputs
    grads = [_rows_first(tensor, tensor.size(3)) for tensor in inputs]
    rows = query.numel() // query.size(3)
    if query.dtype not in HALF:
        product = torch.empty(rows * value.size(3), dtype=torch.float32)
        sums = torch.empty(rows, dtype=torch.float32)
        del product
        scratch = [torch.empty_like(sums)]
        del sums
    else:
        scratch = [torch.empty(rows, dtype=torch.float32)]
    return grads, [*scratch, torch.empty(_efficient_workspace_bytes(inputs, call), dtype=torch.uint8)]


def _efficient_workspace_bytes(inputs: Inputs, call: KernelCall) -> int:
    """Follows ``mem_eff_attention/kernel_backward.h: Params::workspace_size``, for the first kernel of
    ``kernels/cutlassB.h`` that fits the shared memory: 163 KiB on 8.0, 9.0 and 10.x, at most 99 KiB elsewhere."""
    query, key, value = inputs
    half, head = query.dtype in HALF, max(query.size(3), value.size(3))
    large_card = call.capability in ((8, 0), (9, 0)) or call.capability[0] == 10
    ampere_half = half and call.capability[0] >= 8
    block_rows, block_keys, bound = 64, 64, 64 if head <= 64 else 128 if head <= 128 else 1 << 16
    if ampere_half and head <= 96 and head > 64 and call.capability in ((8, 6), (8, 9)):
        block_rows, bound = 128, 96
    elif head > 64 and large_card:
        block_rows, block_keys = 128, 128 if ampere_half and head <= 128 else 64
    in_registers = half and bound <= block_rows
    batch_heads = query.size(0) * query.size(1)
    blocks = -(-query.size(2) // block_rows) * -(-query.size(3) // block_keys)
    elements = blocks * (4 + block_rows * block_keys)
    if half and not in_registers:
        splits = max(1, min(-(-key.size(2) // block_keys), 200 // batch_heads))
        elements += splits * block_keys * (_round_up(query.size(3), block_rows) + _round_up(value.size(3), block_rows))
    return int(batch_heads * _round_up(elements, 4) * 4)


def _flash3_backward(inputs: Inputs, call: KernelCall) -> Made:
    """Follows ``hopper/flash_api.cpp: mha_bwd`` with its largest blocks (128 rows, 128 keys)."""
    query, key, _ = inputs
    grads = [torch.empty_like(tensor) for tensor in inputs]
    batch, heads, rows, head_size = query.shape
    rounded = next(size for size in (64, 96, 128, 192, 256) if head_size <= size)
    query_rows, key_rows = (batch * _round_up(count, 128) for count in (rows, key.size(2)))
    if call.ends is not None:
        padding = 128 * (call.ends.shape[0] - 1)
        query_rows, key_rows = (_round_up(count + padding, 128) for count in (batch * rows, batch * key.size(2)))
    scratch = [torch.empty(heads * query_rows * width, dtype=torch.float32) for width in (1, 1, rounded)]
    if key.size(1) != heads:
        scratch += [torch.empty(key.size(1) * key_rows * rounded, dtype=torch.float32) for _ in range(2)]
    return grads, scratch


KERNELS: dict[Backend, tuple[Callable[..., Kept], Callable[..., Made]]] = {
    Backend.FLASH: (_flash_forward, _flash_backward),
    Backend.FLASH3: (_flash_forward, _flash3_backward),
    Backend.CUDNN: (_cudnn_forward, _cudnn_backward),
    Backend.EFFICIENT: (_efficient_forward, _efficient_backward),
}
"""The functions that allocate the buffers of each backend's forward and backward kernel."""
