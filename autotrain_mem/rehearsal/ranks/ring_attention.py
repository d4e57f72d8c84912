"""Rehearses context parallelism on CPU tensors, with torch's own ring attention and stand-ins for CUDA's kernels.

``_context_parallel/_attention.py: _templated_ring_attention`` sends keys and values around the processes and calls a
fused kernel on each share. It runs unchanged, so its buffers are in the trace. Only the kernels
(``_sdpa_handler: call_maps``) are replaced (``cuda.attention_kernels``).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _replaced_functions,
    _templated_ring_attention,
    _templated_ring_attention_backward,
)
from torch.nn import functional

from autotrain_mem.rehearsal.cuda.attention import autocast_inputs, by_rows, unseen, visible_share
from autotrain_mem.rehearsal.cuda.attention_kernels import KERNELS, Backend, KernelCall, choose
from autotrain_mem.rehearsal.trace.operator_costs import attention
from autotrain_mem.rehearsal.trace.recorder import note
from autotrain_mem.support.errors import RehearsalError
from autotrain_mem.types.hardware import Capability

TOKENS_DIM = 2
"""The dimension of tokens in B x H x S x D (``_attention.py: _scaled_dot_product_ring_flash_attention``)."""

_aten = torch.ops.aten


@contextmanager
def ring_attention(compute_capability: Capability) -> Iterator[None]:
    """Within the block, attention over sharded tokens uses the ring, as on a card of this compute capability.

    Attention over a process's own tokens alone raises RehearsalError, since the prediction would be too low. The inner
    function has the name of torch's function, by which ``_attention.py: _distribute_function`` replaces it.
    """

    def scaled_dot_product_attention(
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
        if not isinstance(query, DTensor):
            raise RehearsalError(
                "Context parallelism cannot be rehearsed for this model: a layer attends to one process's tokens only.",
                hint="The prediction would be too low. Give --cp_size 1, and please report the model and the flags.",
            )
        inputs = autocast_inputs(query, key, value)
        facts: dict[str, Any] = {"dropout": dropout_p, "is_causal": is_causal, "enable_gqa": enable_gqa}
        backend = choose(tuple(inputs), attn_mask, capability=compute_capability, **facts)
        is_odd = query.size(-1) % 8 != 0  # torch pads heads of these sizes
        if attn_mask is not None or not is_causal or is_odd or backend not in (Backend.FLASH, Backend.CUDNN):
            raise RehearsalError(
                f"Context parallelism does not run with this model's attention: CUDA picks the {backend} kernel.",
                hint="Ring attention needs causal attention without a mask, in bfloat16 or float16. Give --bf16, or "
                "remove --cp_size.",
            )
        call = KernelCall(backend, compute_capability, is_causal, scale)
        with torch.autocast("cpu", enabled=False):
            out = RingAttention.apply(*(each.to_local() for each in inputs), query.device_mesh.get_group(), call)
        return DTensor.from_local(out, query.device_mesh, query.placements, run_check=False)

    with (
        patch.object(functional, "scaled_dot_product_attention", scaled_dot_product_attention),
        patch.dict(_replaced_functions),  # torch never clears this dict
    ):
        yield


class RingAttention(torch.autograd.Function):  # type: ignore[misc]  # untyped to mypy here
    """Runs torch's ring attention over a group's tokens: allocates like CUDA's kernel, and computes with the CPU's."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any, call: KernelCall) -> Tensor:
        """``query``, ``key`` and ``value`` hold this process's share of the tokens."""

        def kernel(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Any:
            return _forward(query, key, value, replace(call, is_causal=is_causal))

        out, *kept = _templated_ring_attention(
            group, TOKENS_DIM, kernel, query=query, key=key, value=value, is_causal=call.is_causal
        )
        ctx.group, ctx.call = group, call
        ctx.save_for_backward(query, key, value, out, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sends keys and values around again, together with their gradients in float32."""
        query, key, value, out, logsumexp, *_ = ctx.saved_tensors
        call: KernelCall = ctx.call

        def kernel(*, is_causal: bool, **tensors: Tensor) -> Any:
            return _backward(replace(call, is_causal=is_causal), **tensors)

        tensors = {"query": query, "key": key, "value": value, "out": out, "logsumexp": logsumexp}
        options = {"grad_out": grad, "grad_out_name": "grad_out", "is_causal": call.is_causal}
        grads = _templated_ring_attention_backward(ctx.group, TOKENS_DIM, kernel, **options, **tensors)
        return (*grads[:3], None, None)


def _forward(query: Tensor, key: Tensor, value: Tensor, call: KernelCall) -> tuple[Tensor, ...]:
    out, (logsumexp, *rest) = KERNELS[call.backend][0](query, value, call)
    note(attention(query, key, value, visible=visible_share(query, key, call)))
    if not isinstance(query, FakeTensor):
        with unseen():
            heads = query.size(1)
            values = _aten._scaled_dot_product_flash_attention_for_cpu(
                query, _repeated(key, heads), _repeated(value, heads), 0.0, call.is_causal, scale=call.scale
            )
            out.copy_(values[0])
            logsumexp.copy_(values[1])
    if call.backend is Backend.CUDNN:  # whose logsumexp has one dimension more (``_SDPAMerger._merge_one``)
        logsumexp = logsumexp.unsqueeze(-1)
    return out, logsumexp, *rest


def _backward(
    call: KernelCall, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, ...]:
    inputs = (query, key, value)
    grad_out, out = by_rows(grad_out, out, call.backend)
    grads, scratch = KERNELS[call.backend][1](inputs, call)
    note(attention(*inputs, visible=visible_share(query, key, call), backward=True))
    if not isinstance(query, FakeTensor):
        with unseen():  # gradients for this share of the keys, from the logsumexp over all keys
            heads, groups = query.size(1), key.size(1)
            repeated = (query, _repeated(key, heads), _repeated(value, heads))
            statistics = logsumexp.squeeze(-1) if call.backend is Backend.CUDNN else logsumexp
            filled = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, *repeated, out, statistics, 0.0, call.is_causal, scale=call.scale
            )
            grads[0].copy_(filled[0])
            for grad, of_heads in zip(grads[1:], filled[1:], strict=True):
                grad.copy_(of_heads.unflatten(1, (groups, heads // groups)).sum(2))
    del scratch
    return tuple(grads)


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """Repeats keys for each group of heads: the CPU's kernel needs as many key heads as query heads."""
    return tensor.repeat_interleave(heads // tensor.size(1), 1) if tensor.size(1) != heads else tensor
