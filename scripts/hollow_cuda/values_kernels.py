"""Computes values for the device: after each CUDA kernel, which does nothing, the same operator's CPU kernel runs.

The device's memory is the host's (values_memory.c), so both kernels use the same bytes. The kernels are replaced at the
dispatch key CUDA, below autograd and without a mode, so autograd and the allocator remain torch's own. Results are a
CPU's. Kernels that the CPU lacks are written here (attention) or compute nothing; HOLLOW_TRACE=1 prints their names.
"""

import ctypes
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

KEY = "CUDA"
UNTOUCHED = ("view", "set_", "lift", "t")
UNTOUCHED_PREFIXES = (
    *("as_strided", "_reshape_alias", "alias", "detach", "split", "select", "slice", "squeeze", "unsqueeze", "expand"),
    *("permute", "transpose", "unfold", "empty", "resize", "_resize", "storage", "record_stream", "is_set_to"),
    *("is_pinned", "_pin_memory", "_local_scalar_dense", "_assert_async", "_copy_from", "_fused_sdp", "_fill_mem_eff"),
    *("cudnn", "_cudnn", "_use_cudnn", "miopen", "_nested", "_sparse", "_spdiags", "_foobar"),
)
"""Prefixes of operators that move no bytes, or only through the runtime, or are never used here."""
COPY = "aten::copy_"
"""Registered for all devices at once, so it is not listed among the CUDA kernels."""

_libraries = {namespace: torch.library.Library(namespace, "IMPL") for namespace in ("aten", "bitsandbytes")}
_runtime = ctypes.CDLL("libcudart.so.13")
_traced = bool(os.environ.get("HOLLOW_TRACE"))


def install(namespace: str = "aten") -> None:
    """Wraps every CUDA kernel of the operators in a namespace."""
    with torch._C._DisableTorchDispatch():
        names = torch._C._dispatch_get_registrations_for_dispatch_key(KEY)
        for name in [*(name for name in names if name.startswith(f"{namespace}::")), COPY]:
            plain = name.partition("::")[2].partition(".")[0]
            if not name.startswith(namespace) or plain in UNTOUCHED or plain.startswith(UNTOUCHED_PREFIXES):
                continue
            try:
                _wrap(namespace, name)
            except (AttributeError, RuntimeError) as error:  # the registered name is no callable operator
                _trace(f"not wrapped: {name}: {error}")


def _wrap(namespace: str, name: str) -> None:
    packet, _, overload = name.partition("::")[2].partition(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    on_device = torch.library.get_kernel(operator, KEY)
    tensors = {index for index, each in enumerate(operator._schema.arguments) if str(each.type) == "Tensor"}
    on_host, size_of = WRITTEN_HERE.get(name, operator), SIZES.get(name)
    known = on_host is not operator or torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_tensor(each, args) if index in tensors else each for index, each in enumerate(args))
        if not known:
            _trace(f"not computed: {name}")
            return on_device.call_boxed(keys, *args, **kwargs)
        if size_of is not None:
            _runtime.standin_answer(ctypes.c_longlong(size_of(*_on_host(args), **_on_host(kwargs))))
        try:
            out = on_device.call_boxed(keys, *args, **kwargs)
        finally:
            _runtime.standin_no_answer()
        try:
            _write(out, on_host(*_on_host(args), **_on_host(kwargs)))
        except (RuntimeError, TypeError, NotImplementedError) as error:
            _trace(f"the CPU refuses {name}: {error}")
        return out

    _libraries[namespace].impl(operator, kernel, KEY, with_keyset=True)


def _trace(text: str) -> None:
    if _traced:
        print(f"hollow: {text}", file=sys.stderr)


def _tensor(item: Any, args: Any) -> Any:
    """Converts a number to the tensor that the operator's schema requires; autograd may pass plain numbers."""
    if not isinstance(item, (bool, int, float)):
        return item
    dtypes = [each.dtype for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
    if isinstance(item, bool):
        return torch.tensor(item)
    if isinstance(item, int):
        is_number = bool(dtypes) and dtypes[0] is not torch.bool
        return torch.tensor(item, dtype=dtypes[0] if is_number else torch.int64)
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    return torch.tensor(item, dtype=floats[0] if floats else torch.get_default_dtype())


def same_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor that shares the bytes of a device tensor."""
    if not tensor.is_cuda:
        return tensor
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    storage = tensor.untyped_storage()
    raw = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(raw, tensor.storage_offset(), tensor.size(), tensor.stride())


def _on_host(items: Any) -> Any:
    def one(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return same_bytes(item)
        if isinstance(item, torch.device):
            return torch.device("cpu") if item.type == "cuda" else item
        return None if item.device.type == "cuda" else item  # a generator

    return tree_map_only((torch.Tensor, torch.device, torch.Generator), one, items)


def _write(out: Any, computed: Any) -> None:
    outs = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
    values = [each for each in tree_leaves(computed) if isinstance(each, torch.Tensor)]
    for target, value in zip(outs, values, strict=False):
        if not target.is_cuda or target.numel() == 0:
            continue
        there = same_bytes(target)
        in_place = value.untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
        if not in_place and there.shape == value.shape:
            there.copy_(value)


def _attention(q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: float | None) -> tuple[Any, Any]:
    """Returns output and attention probabilities. q: (batch, heads, length, width); k and v may have fewer heads."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    weights = (q.float() @ k.float().transpose(-1, -2)) * scale
    if causal:
        weights = weights.masked_fill(torch.ones(weights.shape[-2:], dtype=torch.bool).tril().logical_not(), -math.inf)
    if bias is not None:
        weights = weights + bias.float()
    shares = torch.softmax(weights, -1).nan_to_num()
    return (shares @ v.float()).to(q.dtype), shares


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, shares: Any, scale: float | None) -> tuple[Any, Any, Any]:
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    grad, groups = grad.float(), q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
    grad_v, grad_shares = shares.transpose(-1, -2) @ grad, grad @ v.float().transpose(-1, -2)
    grad_weights = shares * (grad_shares - (grad_shares * shares).sum(-1, keepdim=True))
    grad_q, grad_k = grad_weights @ k.float() * scale, grad_weights.transpose(-1, -2) @ q.float() * scale
    grad_k, grad_v = (each.unflatten(1, (-1, groups)).sum(2) for each in (grad_k, grad_v))
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _efficient(
    q: Any, k: Any, v: Any, bias: Any, lse: bool, p: float = 0.0, causal: bool = False, *, scale: Any = None
) -> Any:
    return [_attention(q, k, v, bias, causal, scale)[0]]


def _efficient_backward(grad: Any, q: Any, k: Any, v: Any, bias: Any, *rest: Any, scale: Any = None) -> Any:
    causal = rest[6] if len(rest) > 6 else False  # out, lse, seed, offset, p, mask, causal
    return _attention_backward(grad, q, k, v, _attention(q, k, v, bias, causal, scale)[1], scale)


def _flash(q: Any, k: Any, v: Any, p: float = 0.0, causal: bool = False, *rest: Any, scale: Any = None) -> Any:
    return [_attention(q, k, v, None, causal, scale)[0]]


def _flash_backward(grad: Any, q: Any, k: Any, v: Any, *rest: Any, scale: Any = None) -> Any:
    causal = rest[7]  # out, lse, two lists of lengths, two longest lengths, p, causal, seed, offset
    return _attention_backward(grad, q, k, v, _attention(q, k, v, None, causal, scale)[1], scale)


WRITTEN_HERE: dict[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_efficient_attention": _efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::_scaled_dot_product_flash_attention": _flash,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
}
SIZES: dict[str, Callable[..., int]] = {
    "aten::nonzero": lambda tensor: int(torch.count_nonzero(tensor)),
    "aten::masked_select": lambda tensor, mask: int(torch.count_nonzero(torch.broadcast_tensors(tensor, mask)[1])),
    "aten::_unique2": lambda tensor, *rest, **options: int(torch.unique(tensor).numel()),
    "aten::repeat_interleave.Tensor": lambda repeats, output_size=None: int(repeats.sum()),
}
"""Operators that read the size of their result back from the device -> how to compute that size."""
