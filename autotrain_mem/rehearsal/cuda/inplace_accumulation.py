"""Restores autograd's in-place operators, which torch avoids under a dispatch mode such as the recorder.

Autograd adds a gradient to a buffer that nothing else holds (``torch/csrc/autograd/input_buffer.cpp:
can_accumulate_inplace``), and some backward formulas write into zeros that they have just allocated
(``torch/csrc/autograd/FunctionsManual.cpp: gather_backward``, ``index_backward``,
``value_selecting_reduction_backward``, ``masked_select_backward``). Under a dispatch mode both allocate a new tensor
(``aten/src/ATen/TensorSubclassLikeUtils.h: isTensorSubclassLike``), for example at every residual connection.
"""

import functools
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_ATEN = torch.ops.aten
_SUM = _ATEN.add.Tensor

IN_PLACE = {
    _SUM: _ATEN.add_.Tensor,
    _ATEN.scatter_add.default: _ATEN.scatter_add_.default,
    _ATEN.scatter.src: _ATEN.scatter_.src,
    _ATEN.index_put.default: _ATEN.index_put_.default,
    _ATEN.masked_scatter.default: _ATEN.masked_scatter_.default,
}
"""Maps operators that autograd runs under a dispatch mode to those that it runs without one."""

_WRITERS = ("Gather", "Index", "Max", "Min", "Sort", "Topk", "Median", "Kthvalue", "Mode", "MaskedSelect", "Cummax")
_WRITING_NODES = tuple(f"{name}Backward" for name in _WRITERS)
"""Backward formulas that write into zeros that they allocated."""


def unwatched(operator: Any, args: tuple[Any, ...]) -> Any:
    """Returns the operator that would run without a dispatch mode, for one of :data:`IN_PLACE`."""
    if torch.is_grad_enabled() or not isinstance(args[0], torch.Tensor):
        return operator
    if (node := torch._C._current_autograd_node()) is None:
        return operator
    if operator is not _SUM:
        return IN_PLACE[operator] if node.name().startswith(_WRITING_NODES) else operator
    # Autograd's sum can overwrite its first operand. A local variable for it would change its reference count.
    if not isinstance(args[1], torch.Tensor) or args[0].shape != args[1].shape or args[0].dtype != args[1].dtype:
        return operator
    is_dense = torch._prims_common._is_non_overlapping_and_dense_or_false
    return (
        IN_PLACE[operator]
        if _holders(args) == sole_holders() and is_dense(args[0].shape, args[0].stride())
        else operator
    )


Holders = tuple[int, int, int]


def _holders(args: tuple[Any, ...]) -> Holders:
    """Returns the reference counts of the first argument, its storage and its Python object."""
    tensor = args[0]
    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(tensor)


@functools.cache
def sole_holders() -> Holders:
    """Returns the reference counts of a gradient that only autograd's buffer holds, which differ by version. Call this
    before recording, since it builds a graph."""
    found: list[Holders] = []

    class Counting(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped to mypy here
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _SUM:
                found.append(_holders(args))
            return func(*args, **(kwargs or {}))

    with _disable_current_modes(), torch.autocast("cpu", enabled=False), torch.enable_grad(), Counting():
        twice = torch.ones(2, requires_grad=True) * 1.0
        (twice.exp() * twice.sin()).sum().backward()
    (holders,) = found
    return holders
