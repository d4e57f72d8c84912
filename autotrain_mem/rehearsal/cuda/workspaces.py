"""Counts the memory that CUDA's kernels take from torch's allocator and return within one operator.

Each row of the table names the file and symbol that allocates (torch 2.13, below ``aten/src/ATen/``) and counts the
buffers that are alive at once. cub's radix sort copies its keys and values (``cub/device/device_radix_sort.cuh:
SortPairs`` without DoubleBuffer). The buffers of attention kernels are allocated in ``attention``.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from autotrain_mem.rehearsal.cuda.attention_kernels import HALF
from autotrain_mem.rehearsal.trace.recorder import Scratch, Workspace
from autotrain_mem.types.hardware import Capability

NOT_COUNTED = (
    "CUDA workspaces of less than 1 MiB in a training step (of topk, scans, grouped matrix products, and of reductions "
    "other than sums over rows), workspaces of cuDNN's convolutions, and layer_norm's partial gradients beyond 65,536 "
    "tokens",
    "copies that kernels other than softmax make of inputs that are not contiguous",
)

INT64, FLOAT = 8, 4

_aten = torch.ops.aten

Row = Callable[[tuple[Any, ...], dict[str, Any], Any], int]
"""Returns the scratch bytes for an operator's arguments and its result."""


def workspaces(compute_capability: Capability) -> Workspace:
    """Returns the workspace function of one run on a card.

    cuBLAS and cublasLt permanently share a workspace per thread (``cuda/CublasHandlePool.cpp: setWorkspaceForHandle``).
    On CUDA, autograd runs the backward pass in a thread of its own, so a run keeps two workspaces.
    """
    rows: dict[Any, Row] = {
        _aten.sum.dim_IntList: _sum_over(compute_capability),
        _aten.sum.default: _sum_converted,
        _aten.embedding_dense_backward.default: _embedding_backward,
        # native/cuda/SoftMax.cu: host_softmax copies a non-contiguous input, such as a slice of logits.
        _aten._softmax.default: lambda args, kwargs, out: _copied(args[0]),
        _aten._log_softmax.default: lambda args, kwargs, out: _copied(args[0]),
        # softmax_backward_cuda_out holds `tmp = grad * output`; for log_softmax host_softmax_backward copies inputs
        # that are not contiguous.
        _aten._softmax_backward_data.default: lambda args, kwargs, out: int(args[0].nbytes),
        _aten._log_softmax_backward_data.default: lambda args, kwargs, out: _copied(args[0]) + _copied(args[1]),
        # native/ReduceOps.cpp: logsumexp_out_impl holds `(self - maxes).exp_()`, and integer inputs as float32.
        _aten.logsumexp.default: lambda args, kwargs, out: (
            int(args[0].nbytes) if args[0].is_floating_point() else 2 * args[0].numel() * FLOAT
        ),
        # native/Distributions.cpp: multinomial_out holds `q`, an exponential draw for each probability.
        _aten.multinomial.default: lambda args, kwargs, out: int(args[0].nbytes),
        _aten._foreach_norm.Scalar: _foreach_norm,
        _aten.sort.default: _sort,
        _aten.sort.stable: _sort,
        _aten.index.Tensor: _index,
        **dict.fromkeys(
            (_aten._index_put_impl_.default, _aten.index_put_.default, _aten.index_put.default), _index_put
        ),
        # native/cuda/IndexKernel.cpp: masked_select_out_cuda_impl indexes by the positions of the expanded mask.
        _aten.masked_select.default: lambda args, kwargs, out: out.numel() * max(args[0].dim(), args[1].dim()) * INT64,
        _aten.masked_scatter.default: _masked_scatter,
        _aten.masked_scatter_.default: _masked_scatter,
    }
    forward, backward = ((Scratch(cublas_bytes(compute_capability), kept_as="cuBLAS workspace"),) for _ in range(2))

    def workspace(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[Scratch, ...]:
        if operator in _BY_CUBLAS:
            return forward if torch._C._current_graph_task_id() == -1 else backward
        row = rows.get(operator)
        size = 0 if row is None else row(args, kwargs, out)
        return (Scratch(size),) if size else ()

    return workspace


_BY_CUBLAS = frozenset(
    {
        *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
        *(_aten.mv.default, _aten.addmv.default, _aten.dot.default, _aten._addmm_activation.default),
    }
)


def _copied(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_contiguous() else int(tensor.nbytes)


MULTIPROCESSORS = {
    (7, 0): 80,
    (7, 5): 72,
    (8, 0): 108,
    (8, 6): 84,
    (8, 9): 142,
    (9, 0): 132,
    (10, 0): 148,
    (12, 0): 188,
}
"""Multiprocessors of the largest card of a compute capability; its other cards take less memory."""

_THREADS_PER_MULTIPROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""Source: CUDA Programming Guide, technical specifications per compute capability; 2048 elsewhere."""

_BLOCK_THREADS, _WARP, _WIDEST_VECTOR = 512, 32, 4
_FEWEST_VALUES, _MOST_VALUES = 16, 256
_LARGEST_INDEX = 2**31 - 1


def cublas_bytes(compute_capability: Capability) -> int:
    """Returns the bytes of cuBLAS's workspace (``cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize``, without
    ``CUBLAS_WORKSPACE_CONFIG``): 32 MiB from Hopper on, else two chunks of 4 MiB and eight of 16 KiB."""
    return 32 << 20 if compute_capability[0] >= 9 else 2 * (4096 << 10) + 8 * (16 << 10)


def _sum_over(compute_capability: Capability) -> Row:
    """Counts the scratch memory of sums over rows, such as bias gradients; unknown cards count as the largest."""
    multiprocessors = MULTIPROCESSORS.get(compute_capability, max(MULTIPROCESSORS.values()))
    threads = multiprocessors * _THREADS_PER_MULTIPROCESSOR.get(compute_capability, 2048)

    def row(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        tensor, dims = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
        return _sum_converted(args, kwargs, out) + _sum_parts(tensor, dims, out, threads)

    return row


def _sum_converted(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Counts a cast's bytes; half is summed to float32 without a cast (``native/ReduceOpsUtils.h: make_reduction``)."""
    tensor = args[0]
    as_it_is = tensor.dtype is out.dtype or (tensor.dtype in HALF and out.dtype is torch.float32)
    return 0 if as_it_is else int(tensor.numel() * out.element_size())


def _sum_parts(tensor: torch.Tensor, dims: Any, out: torch.Tensor, threads: int) -> int:
    """Follows ``native/cuda/Reduce.cuh: setReduceConfig, ReduceConfig::global_memory_size``.

    Blocks that share a sum over rows keep a float32 partial sum for every output and thread of their width. 4096 rows
    of 896: 64 blocks x 32 threads x 4 columns x 896 outputs x 4 bytes = 28 MiB. The card runs ``threads`` at once.
    """
    if tensor.numel() < _MOST_VALUES:
        return 0
    rows, columns, vector = _rows_and_columns(tensor, dims)
    while rows * columns * tensor.element_size() > _LARGEST_INDEX and rows > 1:
        rows = -(-rows // 2)  # TensorIterator.cpp: with_32bit_indexing sums one half of the rows after the other
    if not columns or rows < _MOST_VALUES:
        return 0
    # the largest powers of two not above each count
    across, down = (1 << (count.bit_length() - 1) for count in (columns // vector, rows))
    most = _BLOCK_THREADS // vector
    height = min(down, most // min(across, _WARP))
    width = min(across, most // height)
    values, grid, blocks = -(-rows // height), -(-(columns // vector) // width), threads // (width * height)
    if values < _MOST_VALUES or grid > blocks:
        return 0
    shares = max(min(-(-blocks // grid), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    return shares * width * vector * columns * max(FLOAT, out.element_size()) if shares > 1 else 0


def _rows_and_columns(tensor: torch.Tensor, dims: Any) -> tuple[int, int, int]:
    """Returns the values per sum, the number of sums (0 if the fastest dimension is summed), and the sums that a thread
    loads at once (``Reduce.cuh: get_output_vec_size``)."""
    summed = {dim % tensor.dim() for dim in dims or range(tensor.dim())}
    shape = zip(tensor.stride(), tensor.shape, (dim in summed for dim in range(tensor.dim())), strict=True)
    fastest_first = sorted((stride, size, is_summed) for stride, size, is_summed in shape if size != 1)
    rows = math.prod(size for _, size, is_summed in fastest_first if is_summed)
    columns = math.prod(size for _, size, is_summed in fastest_first if not is_summed)
    if not fastest_first or fastest_first[0][2]:
        return rows, 0, 1
    together, others = 1, [tensor.storage_offset()]
    for stride, size, is_summed in fastest_first:
        if stride == together and not is_summed and len(others) == 1:
            together *= size
        else:
            others.append(stride)
    vector = math.gcd(together, _WIDEST_VECTOR, *others) if fastest_first[0][0] == 1 else 1
    return rows, columns, vector


_FEW_INDICES = 3072
_ROWS_PER_PARTIAL = 10


def _embedding_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Follows ``native/cuda/Embedding.cu: embedding_dense_backward_cuda``, which sorts the tokens and keeps partial
    sums (``EmbeddingBackwardKernel.cu: embedding_backward_cuda_kernel``, NROWS_PER_THREAD = 10).

    4 x 4096 tokens of 4096 floats: (1638 + 16384) partial sums x 4096 x 4 bytes = 282 MiB.
    """
    grad, indices, vocabulary, _, by_frequency = args
    tokens, size = indices.numel(), indices.element_size()
    if tokens <= _FEW_INDICES and not by_frequency:
        return 0
    segments = min(tokens, vocabulary)
    partials = tokens // _ROWS_PER_PARTIAL + segments
    kept = (3 if by_frequency else 2) * tokens * size  # sorted_indices, orig_indices, count
    sorting = 3 * tokens * size  # range, and cub's copy of keys and values
    adding = (tokens + 2 * segments + partials) * size + partials * grad.shape[-1] * max(FLOAT, grad.element_size())
    return int(kept + max(sorting, adding))


_FOREACH_CHUNK = 65536


def _foreach_norm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Follows ``native/cuda/ForeachReduceOp.cu: _foreach_tensor_norm_cuda_impl``: ``output_per_tensor`` has a partial
    norm per chunk (``MultiTensorApply.cuh: kChunkSize``) of the largest tensor, for every tensor."""
    tensors = args[0]
    chunks = max((-(-tensor.numel() // _FOREACH_CHUNK) for tensor in tensors), default=0)
    return int(len(tensors) * chunks * max(FLOAT, max((tensor.element_size() for tensor in tensors), default=0)))


_SMALL_SORT = 4096  # native/cuda/Sort.h: should_use_small_sort
_LARGE_SEGMENT = 1_000_000
_FEW_SEGMENTS = 128


def _sort(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Follows ``native/cuda/SortStable.cu: do_launch_stable_sort_kernel``; a row of up to 4096 needs no scratch memory.

    Few rows: two arrays of (row, index) pairs, the sorted keys and cub's copy (``segmented_sort_pairs_by_full_sort``).
    Otherwise: indices and cub's copy, for one row at a time if it has a million elements.
    """
    tensor, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", -1)
    length = tensor.shape[dim] if tensor.dim() else 1
    if length <= _SMALL_SORT:
        return 0
    elements, item = tensor.numel(), tensor.element_size()
    if elements == length or length >= _LARGE_SEGMENT:
        return int(length * (2 * INT64 + item))
    are_few = elements // length < _FEW_SEGMENTS
    return int(elements * (3 * INT64 + 2 * item if are_few else 2 * INT64 + item))


_MASKS = (torch.bool, torch.uint8)


def _index(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Counts the bytes of the positions that masks select (``native/IndexingUtils.h: expandTensors``)."""
    tensor, indices = args
    if not (masks := [index for index in indices if index is not None and index.dtype in _MASKS]):
        return 0
    if len(indices) > 1:
        return int(sum(mask.numel() * mask.dim() for mask in masks)) * INT64
    trailing = math.prod(tensor.shape[masks[0].dim() :])
    return int(out.numel() // max(trailing, 1) * masks[0].dim() * INT64)


def _index_put(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Follows ``native/cuda/Indexing.cu: index_put_with_sort_kernel``, which the backward pass of indexing uses.

    linearIndex, sorted_indices, orig_indices, range, and cub's copy of keys and values are six numbers per index; a
    mask adds its positions.
    """
    _, indices, values, *accumulate = args
    if not accumulate or not accumulate[0]:
        return 0
    if masks := sum(index.dim() for index in indices if index is not None and index.dtype in _MASKS):
        selected = values.shape[0] if values.dim() else 0
    else:
        selected = math.prod(torch.broadcast_shapes(*(index.shape for index in indices if index is not None)))
    return int(selected * (6 + masks) * INT64)


def _masked_scatter(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Follows ``native/cuda/IndexKernel.cpp: masked_scatter__cuda``: ``maskPrefixSum`` is int64."""
    mask = args[1]
    is_whole = mask.is_contiguous() and mask.shape == out.shape
    return int(out.numel() * (INT64 + (not is_whole)))
