"""Makes attention on CPU tensors, fake or real, allocate like the kernel that CUDA picks in torch 2.13.

CUDA has four kernels, whose memory differs by whole score matrices (``aten/src/ATen/native/transformers/attention.cpp:
scaled_dot_product_attention``). With a mask that requires a gradient, the CPU's kernel still runs.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autotrain_mem.rehearsal.cuda import attention_kernels as kernels
from autotrain_mem.rehearsal.cuda.attention_kernels import Backend, Inputs, KernelCall
from autotrain_mem.rehearsal.cuda.rules import CudaRule
from autotrain_mem.rehearsal.known_values import known_value
from autotrain_mem.rehearsal.trace.operator_costs import attention
from autotrain_mem.rehearsal.trace.recorder import note
from autotrain_mem.trainers.model_support import FLASH_NAMES
from autotrain_mem.types.hardware import Capability

plain_attention = torch.nn.functional.scaled_dot_product_attention

_FLASH_SPLIT = (
    "buffers of flash attention's split over the keys, which runs for few queries (batch x heads x tokens / 64 below "
    "1.6 x the card's multiprocessors): at most about 50 MiB at head size 128 and 100 MiB at 256, during one call"
)
_CUDNN = (
    "cuDNN attention's workspace besides the float32 accumulator of its backward pass: its size is not published, so "
    "no bound is known",
    "another attention kernel, if torch is not 2.13 or cuDNN is 9.15.0 or older: the difference is at most one layer's "
    "queries, keys and values in float32, during one call",
)


def not_counted(compute_capability: Capability) -> tuple[str, ...]:
    """Lists the memory that this module does not count; cuDNN's entries are for the cards on which it runs."""
    return (_FLASH_SPLIT, *(_CUDNN if compute_capability[0] in kernels.CUDNN_CAPABILITIES else ()))


@contextmanager
def cuda_attention(compute_capability: Capability) -> Iterator[None]:
    """Within the block, SDPA and flash-attention allocate as on a card of this compute capability."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None and attn_mask.requires_grad:
            return plain_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        query, key, value, attn_mask = autocast_inputs(query, key, value, attn_mask)
        inputs = (query, key, value)
        facts: dict[str, Any] = {"dropout": dropout_p, "is_causal": is_causal, "enable_gqa": enable_gqa}
        backend = kernels.choose(inputs, attn_mask, capability=compute_capability, **facts)
        with torch.autocast("cpu", enabled=False):
            if backend is Backend.MATH:
                return _math(inputs, attn_mask, scale=scale, **facts)
            call = KernelCall(backend, compute_capability, is_causal, scale, keeps_statistics=kernels.trains(inputs))
            return _fused(inputs, _bias(attn_mask, inputs, backend), call)

    with patch.object(torch.nn.functional, "scaled_dot_product_attention", attend), _flash_by_name(compute_capability):
        yield


def autocast_inputs(*tensors: Tensor | None) -> Any:
    """Casts the inputs like autocast (``aten/src/ATen/autocast_mode.h: AT_FORALL_LOWER_PRECISION_FP``)."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    return [t.to(dtype) if t is not None and t.dtype in (*kernels.HALF, torch.float32) else t for t in tensors]


def _fused(inputs: Inputs, bias: Tensor | None, call: KernelCall) -> Tensor:
    """Pads heads to a multiple of 8 for flash kernels; the scale is still that of the original head size."""
    head_size = inputs[0].size(3)
    if (padding := -head_size % 8) == 0 or call.backend is not Backend.FLASH:
        return FusedAttention.apply(*inputs, bias, call)
    padded = [torch.nn.functional.pad(tensor, (0, padding)) for tensor in inputs]
    scale = call.scale if call.scale is not None else head_size**-0.5
    return FusedAttention.apply(*padded, bias, replace(call, scale=scale))[..., :head_size]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a boolean mask to floats (``attention.cpp: convert_boolean_attn_mask``)."""
    is_boolean = mask.dtype is torch.bool
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype)) if is_boolean else mask


def _bias(mask: Tensor | None, inputs: Inputs, backend: Backend) -> Tensor | None:
    """Returns the mask as the kernel needs it: aligned to 8 for memory-efficient attention (``preprocess_mask``)."""
    if mask is None:
        return None
    query, key, _ = inputs
    bias = _additive(mask, query.dtype)
    if backend is not Backend.EFFICIENT:
        return bias
    if bias.stride(-1) != 1 or any(stride % 8 for stride in bias.stride()[:-1]):
        columns = bias.size(-1)
        bias = torch.nn.functional.pad(bias, (0, 8 - columns % 8))[..., :columns]
    return bias.expand(*query.shape[:3], key.size(2))


def _math(
    inputs: Inputs, mask: Tensor | None, *, scale: float | None, dropout: float, is_causal: bool, enable_gqa: bool
) -> Tensor:
    """Computes ``attention.cpp: _scaled_dot_product_attention_math``, whose scores are float32 even in half precision.
    Under any dispatch mode, torch's own function would add the mask out of place (``areAnyTensorSubclassLike``)."""
    query, key, value = inputs
    dtype, heads = query.dtype, query.size(-3)
    if mask is not None:
        mask = _additive(mask, dtype)
    if dtype in kernels.HALF:
        query, key, value = query.float(), key.float(), value.float()
    factor = math.sqrt(scale if scale is not None else query.size(-1) ** -0.5)
    query = query * factor
    if is_causal:
        rows, columns = query.size(-2), key.size(-2)
        mask = _additive(torch.ones(rows, columns, dtype=torch.bool).tril(), query.dtype)
    if enable_gqa and key.size(-3) != heads:
        key, value = (tensor.repeat_interleave(heads // tensor.size(-3), dim=-3) for tensor in (key, value))
    scores = query @ (key.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(mask)
    scratch = torch.empty_like(scores), torch.empty_like(scores, dtype=torch.bool)  # attention.cpp: _safe_softmax
    weights: Tensor = torch.ops.aten._safe_softmax(scores, -1)
    del scratch
    if dropout > 0.0:
        weights = torch.native_dropout(weights, dropout, True)[0]
    weights.detach().to(dtype)  # the second result, which nothing uses
    return (weights @ value).to(dtype)


@contextmanager
def _flash_by_name(capability: Capability) -> Iterator[None]:
    """Replaces transformers' ``_lazy_imports``, so that it loads stand-ins for flash kernels, also under the kernels'
    names on the hub (``modeling_utils.py: _check_and_adjust_attn_implementation``)."""
    from transformers import modeling_flash_attention_utils as flash
    from transformers import modeling_utils
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
    from transformers.modeling_utils import AttentionInterface

    def load(implementation: str | None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        backend = Backend.FLASH3 if "3" in (implementation or "") else Backend.FLASH
        dense, packed = _flash_functions(backend, capability)
        return dense, packed, None, flash._pad_input, flash._unpad_input

    loaded = {name: None for name in vars(flash) if name.endswith("_fn") or name == "_loaded_implementation"}
    with (
        patch.dict(vars(flash), {"_lazy_imports": load, **loaded}),
        patch.object(modeling_utils, "is_kernels_available", lambda *args, **kwargs: True),
        patch.dict(AttentionInterface._global_mapping, dict.fromkeys(FLASH_NAMES, flash_attention_forward)),
        patch.dict(AttentionMaskInterface._global_mapping, dict.fromkeys(FLASH_NAMES, flash_attention_mask)),
    ):
        yield


def _flash_functions(backend: Backend, capability: Capability) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns stand-ins for flash_attn_func and flash_attn_varlen_func; parameter names show their features."""

    def attend(rows: Any, scale: Any, is_causal: bool, window: Any, softcap: float, **ends: Tensor) -> Any:
        # KernelCall.window includes the query's own token; transformers' does not (_process_flash_attention_kwargs).
        seen = window[0] + 1 if window[0] >= 0 else None
        call = KernelCall(backend, capability, is_causal, scale, window=seen, softcap=softcap or 0.0, **ends)
        query, key, value = (tensor.transpose(1, 2) for tensor in rows)
        return _fused((query, key, value), None, call).transpose(1, 2)

    def dense(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Tensor:
        return attend((q, k, v), softmax_scale, causal, window_size, softcap)

    def packed(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Tensor:
        ends = {"ends": cu_seqlens_q, "key_ends": cu_seqlens_k}
        return attend((q[None], k[None], v[None]), softmax_scale, causal, window_size, softcap, **ends)[0]

    return dense, packed


class FusedAttention(torch.autograd.Function):  # type: ignore[misc]  # untyped to mypy here
    """Runs one call of a fused kernel: allocates CUDA's buffers, and computes the values on the CPU."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, call: KernelCall) -> Tensor:
        """``query`` is B x H x S x D, ``key`` and ``value`` are B x G x T x D; ``bias`` is added to the scores."""
        out, kept = kernels.KERNELS[call.backend][0](query, value, call)
        note(attention(query, key, value, visible=visible_share(query, key, call)))
        if not isinstance(query, FakeTensor):
            with unseen():
                out.copy_(_values((query, key, value), bias, call))
        ctx.call = call
        ctx.save_for_backward(query, key, value, bias, out, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out, *_ = ctx.saved_tensors
        inputs = (query, key, value)
        call: KernelCall = ctx.call
        grad, out = by_rows(grad, out, call.backend)
        grads, scratch = kernels.KERNELS[call.backend][1](inputs, call)
        note(attention(*inputs, visible=visible_share(query, key, call), backward=True))
        if not isinstance(query, FakeTensor):
            with unseen(), torch.enable_grad():
                leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs)
                values = torch.autograd.grad(_values(leaves, bias, call), leaves, grad)
            with unseen():
                for empty, filled in zip(grads, values, strict=True):
                    empty.copy_(filled)
        del scratch
        return (*grads, None, None)


def by_rows(grad: Tensor, out: Tensor, backend: Backend) -> tuple[Tensor, Tensor]:
    """Makes the gradient contiguous by rows, except for cuDNN's kernel; for flash kernels, the output too."""
    if backend is not Backend.CUDNN:
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    if backend is Backend.FLASH:
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return grad, out


def visible_share(query: Tensor, key: Tensor, call: KernelCall) -> float:
    """Returns the share of scores that the kernel computes; a mask does not reduce it. Two documents of 1000 and 3000
    tokens in a row of 4000, causal: (1000^2 + 3000^2) / 2 / 4000^2 = 0.31."""
    tokens = int(key.size(2))
    lengths = [tokens]
    ends = known_value(call.ends) if isinstance(call.ends, FakeTensor) else call.ends
    if ends is not None:
        with torch._C._DisableTorchDispatch():
            lengths = [int(length) for length in ends.diff().tolist() if length > 0]
    seen = sum(length * min(length, call.window or length) for length in lengths) / tokens**2
    halved = call.is_causal and query.size(2) == tokens and call.window is None
    return seen / 2 if halved else seen


@contextmanager
def unseen() -> Iterator[None]:
    """Hides the block's operators from dispatch modes and autocast."""
    with torch._C._DisableTorchDispatch(), torch.autocast("cpu", enabled=False):
        yield


def _values(inputs: Inputs, bias: Tensor | None, call: KernelCall) -> Tensor:
    """Computes the kernel's result with plain operators, without dropout."""
    query, key, value = inputs
    if call.softcap:
        scale = call.scale if call.scale is not None else query.size(3) ** -0.5
        repeats = query.size(1) // key.size(1)
        keys, values = (tensor.repeat_interleave(repeats, 1).float() for tensor in (key, value))
        scores = call.softcap * torch.tanh(query.float() @ keys.transpose(2, 3) * scale / call.softcap)
        weights = scores.masked_fill(~_visible(query, key, call), float("-inf")).softmax(-1)
        return (weights @ values).to(query.dtype)
    is_plain = call.ends is None and call.window is None and (not call.is_causal or query.size(2) == key.size(2))
    mask, is_causal = (bias, call.is_causal) if is_plain else (_visible(query, key, call), False)
    grouped = query.size(1) != key.size(1)
    return plain_attention(*inputs, mask, is_causal=is_causal, scale=call.scale, enable_gqa=grouped)


def _visible(query: Tensor, key: Tensor, call: KernelCall) -> Tensor:
    """Returns an S x T mask, True if a query sees a key; the last query is aligned with the last key."""
    documents, left = _places(query.size(2), call.ends)
    key_documents, key_left = _places(key.size(2), call.key_ends)
    ahead = key_left - left[:, None]
    seen = documents[:, None] == key_documents
    if call.is_causal:
        seen = seen & (ahead >= 0)
    if call.window is not None:
        seen = seen & (ahead.abs() < call.window)
    return seen


def _places(count: int, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns each token's document, and the number of tokens that follow in it."""
    tokens = torch.arange(count)
    if ends is None:
        return torch.zeros_like(tokens), count - 1 - tokens
    bounds = ends.to(torch.long)
    documents = torch.bucketize(tokens, bounds, right=True)
    return documents, bounds[documents.clamp(max=len(bounds) - 1)] - 1 - tokens


RULES = (CudaRule(lambda recorder, card: cuda_attention(card), not_counted=not_counted),)
