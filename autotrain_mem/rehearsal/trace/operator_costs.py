"""Computes the FLOPs, bytes and kernels of one operator from its arguments and its result.

FLOPs follow torch's formulas (``torch/utils/flop_counter.py: flop_registry``) and those of :data:`_FORMULAS`. Bytes are
those read and written; views and allocations cost nothing.
"""

import functools
import math
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from autotrain_mem.rehearsal.known_values import NO_VALUE, tensors_in, written_arguments
from autotrain_mem.trainers.host_optimizer import master_bytes
from autotrain_mem.types import Kind, Phase, Work

Shapes = Set[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """A :class:`Work` without a phase."""

    kind: Kind = Kind.POINTWISE
    dtype: str = "float32"
    flops: int = 0
    bytes: int = 0
    fixed_bytes: int = 0
    launches: int = 1
    of_step: bool = False
    shape: tuple[int, ...] = ()
    """The lengths with which the cost grows, for work that is not an operator's."""

    def scaled(self, share: float) -> Self:
        """Returns the cost for a share of the tokens; fixed bytes stay."""
        return replace(self, flops=round(self.flops * share), bytes=round(self.bytes * share))

    def fixed(self) -> Self:
        """Returns the cost with all bytes fixed."""
        return replace(self, bytes=0, fixed_bytes=self.bytes + self.fixed_bytes)

    def work(self, phase: Phase) -> Work:
        facts = {name: getattr(self, name) for name in Cost.__slots__ if name != "shape"}
        return Work(phase=phase, count=0.0, **facts)


_aten = torch.ops.aten

_NO_KERNEL = frozenset(
    {
        *NO_VALUE,
        *("aten::_unsafe_view", "aten::set_", "aten::resize_", "aten::_local_scalar_dense", "aten::_reshape_alias"),
        *("aten::is_same_size", "prim::device"),
    }
)
"""Operators that run no kernel on the device: they allocate, make a view, or wait."""


@functools.cache
def is_free(operator: Any) -> bool:
    """Returns whether an operator runs no kernel."""
    return bool(operator.is_view) or operator._schema.name in _NO_KERNEL


def cost_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, weights: Shapes) -> Cost:
    """Returns an operator's cost. The bytes of tensors with a weight's shape do not grow with the tokens."""
    if (ours := _FORMULAS.get(operator._schema.name)) is not None:
        flops = ours(args, out)
    else:
        formula = flop_registry.get(getattr(operator, "overloadpacket", None))
        flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
    read = [*tensors_in((*args, *kwargs.values()))]
    written = [*tensors_in((out,))]
    if not written and operator._schema.is_mutable:  # the operator does not return the arguments that it writes
        written = [*tensors_in((*written_arguments(operator, args), kwargs.get("out")))]
    if operator in _OVERWRITING:
        read = read[1:]
    elif operator in _PICKING:
        read = [*written, *read[1:]]
    moved = [*read, *written]
    fixed = sum(_size_bytes(tensor) for tensor in moved if tuple(tensor.shape) in weights)
    launches = 1
    if args and operator._schema.name.startswith(("aten::_foreach", "aten::_fused")):
        # lists of tensors: 7e9 elements take 7e9 / 65536 / 320 = 334 launches
        chunks = sum(-(-int(tensor.numel()) // _CHUNK_ELEMENTS) for tensor in tensors_in(args[:1]))
        launches = max(1, -(-chunks // _BLOCKS_PER_LAUNCH))
    return Cost(
        kind=Kind.MATMUL if flops else Kind.POINTWISE,
        dtype=_dtype(read if flops else moved),
        flops=flops,
        bytes=sum(map(_size_bytes, moved)) - fixed,
        fixed_bytes=fixed,
        launches=launches,
    )


def _dtype(tensors: Iterable[torch.Tensor]) -> str:
    """Returns the dtype of the last tensor, which in a product is the second factor."""
    found = [tensor.dtype for tensor in tensors]
    return str(found[-1]).removeprefix("torch.") if found else "float32"


_OVERWRITING = frozenset(
    {_aten.copy_.default, _aten.fill_.Scalar, _aten.zero_.default, _aten.fill_.Tensor, _aten._foreach_zero_.default}
)
"""Operators that write their first argument without reading it."""

_PICKING = frozenset(
    {
        *(_aten.embedding.default, _aten.index.Tensor, _aten.index_select.default),
        *(_aten.gather.default, _aten.masked_select.default),
    }
)
"""Operators that read as many bytes of their first argument as they write."""


def _size_bytes(tensor: torch.Tensor) -> int:
    """Counts the bytes of a tensor's elements; an expanded tensor counts at most its storage."""
    shown = int(tensor.numel() * tensor.element_size())
    return min(shown, int(tensor.untyped_storage().nbytes())) if tensor.layout is torch.strided else shown


_CHUNK_ELEMENTS, _BLOCKS_PER_LAUNCH = 65536, 320
"""Limits of a foreach kernel (``aten/src/ATen/native/cuda/MultiTensorApply.cuh: kChunkSize, depth_to_max_blocks``)."""


def _grouped_product(args: tuple[Any, ...], out: torch.Tensor) -> int:
    """Counts the FLOPs of tokens T x K times experts E x K x N, or, for weight gradients, of K x T times T x N."""
    first, second = args[0], args[1]
    if out.dim() == 3 and first.dim() == second.dim() == 2:
        return 2 * int(first.numel()) * int(second.shape[-1])
    return 2 * int(out.numel()) * int(first.shape[-1])


def _plain_product(args: tuple[Any, ...], out: torch.Tensor) -> int:
    """Counts the FLOPs of a product with an activation of ... x K and a result of ... x N."""
    return 2 * int(out.numel()) * int(args[0].shape[-1])


_FORMULAS: dict[str, Callable[[tuple[Any, ...], Any], int]] = {
    "aten::_grouped_mm": _grouped_product,
    "transformers::grouped_mm_fallback": _plain_product,
    # gradients of tokens T x K and weights E x K x N
    "transformers::grouped_mm_fallback_backward": lambda args, out: 4 * int(args[0].numel()) * int(args[3].shape[-1]),
    "bitsandbytes::int8_linear_matmul": _plain_product,
    "bitsandbytes::gemm_4bit": _plain_product,
    "bitsandbytes::gemv_4bit": _plain_product,
}
"""FLOP formulas that torch's registry lacks; each token of a mixture counts only the experts that it chose."""


def product(rows: int, inner: int, columns: int, dtype: torch.dtype) -> Cost:
    """Returns the cost of activations ``rows`` x ``inner`` times a weight ``columns`` x ``inner``."""
    item = dtype.itemsize
    return Cost(
        kind=Kind.MATMUL,
        dtype=str(dtype).removeprefix("torch."),
        flops=2 * rows * inner * columns,
        bytes=rows * (inner + columns) * item,
        fixed_bytes=inner * columns * item,
    )


def pass_through(*tensors: torch.Tensor) -> Cost:
    """Returns the cost of a kernel that reads or writes each of these tensors once."""
    return Cost(dtype=_dtype(tensors), bytes=sum(map(_size_bytes, tensors)))


_forward_flops, _backward_flops = map(functools.cache, (sdpa_flop_count, sdpa_backward_flop_count))
"""torch's formulas; a vision tower has thousands of equal calls."""


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, visible: float, backward: bool = False
) -> Cost:
    """Returns the cost of one call of a fused attention kernel.

    Args:
        query: B x H x S x D.
        key: B x G x T x D.
        visible: Share of the scores that the kernel computes, about half with a causal mask.
    """
    shapes = (query.shape, key.shape, value.shape)
    result = (*query.shape[:3], value.shape[3])
    flops = _backward_flops(result, *shapes) if backward else _forward_flops(*shapes)
    moved = sum(map(_size_bytes, (query, key, value))) + query.numel() * query.element_size()
    return Cost(
        kind=Kind.ATTENTION,
        dtype=str(query.dtype).removeprefix("torch."),
        flops=math.ceil(flops * visible),
        bytes=2 * moved if backward else moved,
        launches=3 if backward else 1,  # row sums before it, and a cast of the query's gradient after it
        shape=tuple(key.shape[2:3]),
    )


def host_copy(tensor: torch.Tensor, kind: Kind = Kind.OVERLAPPED_COPY) -> Cost:
    """Returns the cost of a copy between device and host."""
    return Cost(kind=kind, bytes=tensor.nbytes)


def host_step(parameters: Iterable[torch.Tensor], *, fused: bool, decays: bool = False) -> tuple[Cost, Cost]:
    """Returns the costs of an optimizer step on the host: copies of gradients and weights, and host memory traffic.

    Weights in half precision are stepped as float32 copies; casts of the gradient and the result pass 1.5 times each.

    Fused AdamW (``aten/src/ATen/native/cpu/FusedAdamKernel.cpp``) reads weight, gradient and two moments and writes all
    but the gradient. ``torch/optim/adam.py: _single_tensor_adam`` passes over the weights 20 times: weight decay 2 (0
    without), lerp_ 3, mul_ 2, addcmul_ 3, sqrt 2, division 2, add_ 2, addcdiv_ 4.
    """
    stepped, passes = [*parameters], 7 if fused else 20 if decays else 18
    copied = Cost(kind=Kind.COPY, fixed_bytes=2 * sum(each.nbytes for each in stepped), launches=2 * len(stepped))
    moved_bytes = sum((passes + 3) * master_bytes(each) or passes * each.nbytes for each in stepped)
    return copied, Cost(kind=Kind.HOST_STEP, fixed_bytes=moved_bytes, launches=0)
