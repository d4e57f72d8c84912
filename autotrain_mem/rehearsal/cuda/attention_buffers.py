"""Allocates and keeps what each of CUDA's attention kernels does, on tensors of the CPU, fake or real.

Real tensors get their true values by the CPU's own kernel, unseen. Attention runs without dropout here: on CUDA the
kernels drop inside and allocate nothing for it.

Shapes: B batch, H query heads, G key and value heads, S queries, T keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autotrain_mem.rehearsal.cuda.attention_choice import HALF, Backend, Inputs
from autotrain_mem.rehearsal.known_values import known_value
from autotrain_mem.rehearsal.trace.flops import note
from autotrain_mem.rehearsal.trace.operator_costs import attention
from autotrain_mem.types.amd import ARCHITECTURES
from autotrain_mem.types.hardware import Capability

plain_attention = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a fused kernel, beside its tensors."""

    backend: Backend
    capability: Capability
    is_causal: bool = False
    scale: float | None = None
    _: KW_ONLY
    keeps_statistics: bool = True
    """Whether a backward pass may follow: only flash writes its logsumexp in any case."""
    ends: torch.Tensor | None = None
    key_ends: torch.Tensor | None = None
    """Where documents begin and the last ends in one flattened row of queries, and of keys; None for a batch of equal
    rows."""
    window: int | None = None
    """A query sees keys less than this far away; None for all."""
    softcap: float = 0.0


Kept = tuple[torch.Tensor, list[torch.Tensor]]
"""The result of a forward pass, and what it keeps beside it."""
Made = tuple[list[torch.Tensor], list[torch.Tensor]]
"""The gradients of a backward pass, and its scratch."""


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _rows_first(like: torch.Tensor, head_size: int) -> torch.Tensor:
    """An empty B x H x S x D that lies in memory as B x S x H x D."""
    batch, heads, rows, _ = like.shape
    stride = (rows * heads * head_size, head_size, heads * head_size, 1)
    return torch.empty_strided((batch, heads, rows, head_size), stride, dtype=like.dtype)


def _flash_forward(query: torch.Tensor, value: torch.Tensor, call: Call) -> Kept:
    """``cuda/flash_attn/flash_api.cpp: mha_fwd``: out, the logsumexp of each query, the state of the generator.

    flash-attention 3 (``hopper/flash_api.cpp: mha_fwd``) has no such state.
    """
    out, logsumexp = torch.empty_like(query), torch.empty(query.shape[:3], dtype=torch.float32)
    return out, [logsumexp] if call.backend is Backend.FLASH3 else [logsumexp, torch.empty(2, dtype=torch.int64)]


def _flash_backward(inputs: Inputs, call: Call) -> Made:
    """``flash_api.cpp: mha_bwd`` and ``mha_varlen_bwd``: gradients, float32 accumulators, grouped heads unfolded."""
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


def _cudnn_forward(query: torch.Tensor, value: torch.Tensor, call: Call) -> Kept:
    """``aten/src/ATen/native/cudnn/MHA.cpp: run_cudnn_SDP_fprop``; seed and offset lie on the device."""
    out = torch.empty_like(query) if query.size(3) == value.size(3) else _rows_first(query, value.size(3))
    statistics = [torch.empty(query.shape[:3], dtype=torch.float32)] if call.keeps_statistics else []
    return out, [*statistics, torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)]


def _cudnn_backward(inputs: Inputs, call: Call) -> Made:
    """``MHA.cpp: run_cudnn_SDP_bprop``; its workspace holds what cudnn-frontend's ``node/
    scaled_dot_product_flash_attention.h: CompositeSDPABackwardNode`` does not keep virtual: the row sums, the float32
    accumulator of the query's gradient, and the gradients of grouped heads unfolded."""
    query, key, value = inputs
    grads = [torch.empty_like(tensor) for tensor in inputs]
    elements = query.numel() // query.size(3)
    workspace = 4 * (elements + query.numel())
    if key.size(1) != query.size(1):
        unfolded = query.size(0) * query.size(1) * key.size(2)
        workspace += unfolded * (key.size(3) + value.size(3)) * query.dtype.itemsize
    return grads, [torch.empty(workspace, dtype=torch.uint8)]


def _efficient_forward(query: torch.Tensor, value: torch.Tensor, call: Call) -> Kept:
    """``cuda/attention.cu: _efficient_attention_forward``.

    The logsumexp is padded to 32 rows (``kernel_forward.h: kAlignLSE``); heads above 128 need a float32 copy of the
    output while the kernel runs (``kNeedsOutputAccumulatorBuffer``). Seed and offset lie on the host.
    """
    out = _rows_first(query, value.size(3))
    rows = _round_up(query.size(2), 32) if call.keeps_statistics else 0
    statistics = torch.empty((*query.shape[:2], rows), dtype=torch.float32)
    if max(query.size(3), value.size(3)) > 128 and query.dtype in HALF:
        torch.empty(out.numel(), dtype=torch.float32)
    return out, [statistics]


def _efficient_backward(inputs: Inputs, call: Call) -> Made:
    """``cuda/attention_backward.cu: _efficient_attention_backward``.

    Half precision kernels compute the row sums themselves; float32 multiplies out and gradient beforehand.
    """
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


def _efficient_workspace_bytes(inputs: Inputs, call: Call) -> int:
    """``mem_eff_attention/kernel_backward.h: Params::workspace_size``, for the kernel that ``kernels/cutlassB.h``
    lists first among those that fit the card's shared memory (163 KiB on 8.0, 9.0 and 10.x, 99 KiB or less elsewhere).
    """
    query, key, value = inputs
    half, head = query.dtype in HALF, max(query.size(3), value.size(3))
    assert not isinstance(call.capability, str)  # which has kernels of its own
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


def _flash3_backward(inputs: Inputs, call: Call) -> Made:
    """flash-attention's ``hopper/flash_api.cpp: mha_bwd``, with its largest blocks (128 rows, 128 keys)."""
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


def _aotriton_forward(query: torch.Tensor, value: torch.Tensor, call: Call) -> Kept:
    """``hip/flash_attn/aot/mha_all_aot.hip: mha_fwd_aot``, and ``cuda/attention.cu: _efficient_attention_forward``
    below ``USE_ROCM``: out, the logsumexp of each query, seed and offset of the generator on the device."""
    is_flash = call.backend is Backend.FLASH
    out = torch.empty_like(query) if is_flash else _rows_first(query, value.size(3))
    rows = query.size(2) if is_flash or call.keeps_statistics else 0
    statistics = torch.empty((*query.shape[:2], rows), dtype=torch.float32)
    return out, [statistics, *(torch.empty((), dtype=torch.int64) for _ in range(2))]


def _aotriton_backward(inputs: Inputs, call: Call) -> Made:
    """``mha_all_aot.hip: mha_bwd_aot`` and ``cuda/attention_backward.cu: _efficient_attention_backward`` below
    ``USE_ROCM``: gradients, the row sums (of flash a second time, unused), and what adds the query's gradient up.

    Grouped heads are added up inside; a backward that is fused, as short rows have, takes no row sums.
    """
    query, is_flash = inputs[0], call.backend is Backend.FLASH
    grads = [torch.empty_like(each) if is_flash else _rows_first(each, each.size(3)) for each in inputs]
    rows = query.numel() // query.size(3)
    scratch = [torch.empty(rows, dtype=torch.float32) for _ in range(2 if is_flash else 1)]
    if ARCHITECTURES[str(call.capability)].adds_queries_up:
        scratch.append(torch.empty(query.numel(), dtype=torch.float32))
    return grads, scratch


_KERNELS = {
    Backend.FLASH: (_flash_forward, _flash_backward),
    Backend.FLASH3: (_flash_forward, _flash3_backward),
    Backend.CUDNN: (_cudnn_forward, _cudnn_backward),
    Backend.EFFICIENT: (_efficient_forward, _efficient_backward),
}

_AOTRITON = (_aotriton_forward, _aotriton_backward)


def kernels(call: Call) -> tuple[Callable[[torch.Tensor, torch.Tensor, Call], Kept], Callable[[Inputs, Call], Made]]:
    """Returns what allocates as the forward and the backward kernel of a call do."""
    return _AOTRITON if isinstance(call.capability, str) else _KERNELS[call.backend]


class FusedAttention(torch.autograd.Function):  # type: ignore[misc]  # untyped to mypy here
    """One call of a fused kernel: the buffers are CUDA's, the values the CPU's."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, call: Call
    ) -> torch.Tensor:
        """``query`` is B x H x S x D, ``key`` and ``value`` B x G x T x D, ``bias`` is added to the scores."""
        out, kept = kernels(call)[0](query, value, call)
        note(attention(query, key, value, visible=visible_share(query, key, call)))
        if not isinstance(query, FakeTensor):
            with unseen():
                out.copy_(_values((query, key, value), bias, call))
        ctx.call = call
        ctx.save_for_backward(query, key, value, bias, out, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Computes the gradients that one call's kernel computes, with its scratch."""
        query, key, value, bias, out, *_ = ctx.saved_tensors
        inputs = (query, key, value)
        call: Call = ctx.call
        grad, out = by_rows(grad, out, call.backend)
        grads, scratch = kernels(call)[1](inputs, call)
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


def by_rows(grad: torch.Tensor, out: torch.Tensor, backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    """Every kernel but cuDNN's wants the gradient row by row, flash the result too, and copies one that is not."""
    if backend is not Backend.CUDNN:
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    if backend is Backend.FLASH:
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return grad, out


def visible_share(query: torch.Tensor, key: torch.Tensor, call: Call) -> float:
    """Returns the share of scores that the kernel computes: blocks that no query sees are skipped, a mask hides none.

    Two documents of 1000 and 3000 tokens in a row of 4000, causal: (1000^2 + 3000^2) / 2 / 4000^2 = 0.31.
    """
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
    """The CPU's own work: no mode sees it, and no autocast changes it."""
    with torch._C._DisableTorchDispatch(), torch.autocast("cpu", enabled=False):
        yield


def _values(inputs: Inputs, bias: torch.Tensor | None, call: Call) -> torch.Tensor:
    """Computes what the kernel computes, by plain means; dropout left out."""
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


def _visible(query: torch.Tensor, key: torch.Tensor, call: Call) -> torch.Tensor:
    """S x T, True where a query sees a key; flash-attention aligns the last query with the last key."""
    documents, left = _places(query.size(2), call.ends)
    key_documents, key_left = _places(key.size(2), call.key_ends)
    ahead = key_left - left[:, None]
    seen = documents[:, None] == key_documents
    if call.is_causal:
        seen = seen & (ahead >= 0)
    if call.window is not None:
        seen = seen & (ahead.abs() < call.window)
    return seen


def _places(count: int, ends: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives for each token its document, and how many tokens of that follow."""
    tokens = torch.arange(count)
    if ends is None:
        return torch.zeros_like(tokens), count - 1 - tokens
    bounds = ends.to(torch.long)
    documents = torch.bucketize(tokens, bounds, right=True)
    return documents, bounds[documents.clamp(max=len(bounds) - 1)] - 1 - tokens
