"""Recognises out-of-memory errors of device and host, whichever library raises them, and frees unused memory."""

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")

HOST = "host memory"
"""The result of :func:`kind_of` for host memory."""

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # c10/cuda/CUDACachingAllocator.cpp: DeviceCachingAllocator::malloc (torch.OutOfMemoryError; torch < 2.5 a
    # RuntimeError with the same text). NCCL's own allocations below use other texts.
    ("GPU memory", ("cuda out of memory",)),
    # torch/csrc/distributed/c10d/NCCLUtils.cpp: getNcclErrorDetailStr appends ncclGetLastError; NCCL's
    # include/checks.h: CUDACHECK warns "Cuda failure 2 'out of memory'", older versions without the number, and its
    # include/alloc.h "Failed to CUDA calloc async 4 bytes". In a log, such a line stands alone.
    ("NCCL buffer", ("cuda failure", "'out of memory'")),
    ("NCCL buffer", ("failed to cuda calloc",)),
    ("NCCL buffer", ("failed to cuda malloc",)),
    # aten/src/ATen/cuda/Exceptions.h: TORCH_CUDABLAS_CHECK, aten/src/ATen/cuda/CublasHandlePool.cpp:
    # createCublasHandle. A handle is created with its workspace: cublasCreate returns "not initialized" if there
    # is no memory for it.
    ("cuBLAS workspace", ("cublas_status_alloc_failed",)),
    ("cuBLAS workspace", ("cublas_status_not_initialized", "cublascreate")),
    ("cuBLAS workspace", ("cublas_status_not_initialized", "cublasltcreate")),
    # Exceptions.h: AT_CUDNN_CHECK; names in cuDNN 9 (cudnn_graph.h: cudnnStatus_t), the first one also in cuDNN 8.
    ("cuDNN workspace", ("cudnn_status_alloc_failed",)),
    ("cuDNN workspace", ("cudnn_status_internal_error_device_allocation_failed",)),
    (HOST, ("cudnn_status_internal_error_host_allocation_failed",)),
    # Exceptions.h: TORCH_CUSOLVER_CHECK, TORCH_CUDASPARSE_CHECK.
    ("cuSOLVER workspace", ("cusolver_status_alloc_failed",)),
    ("cuSPARSE workspace", ("cusparse_status_alloc_failed",)),
    # bitsandbytes csrc/ops.cuh: CUDA_CHECK_RETURN prints this and exits with code 1: there is no exception, only
    # the child's last line of output. cget_managed_ptr (paged optimizers) uses it.
    ("bitsandbytes buffer", ("error out of memory at line", "csrc")),
    # c10/cuda/CUDAException.cpp: c10_cuda_check_implementation, cudaErrorMemoryAllocation: CUDA memory outside the
    # allocator (pinned host memory: aten/src/ATen/cuda/CachingHostAllocator.cpp; streams, graphs, a context).
    ("CUDA runtime memory", ("cuda error: out of memory",)),
    # c10/cuda/driver_api.h: C10_CUDA_DRIVER_CHECK (expandable segments); triton's backends/nvidia/driver.c: gpuAssert.
    ("CUDA driver memory", ("cuda driver error: out of memory",)),
    ("CUDA driver memory", ("triton error [cuda]: out of memory",)),
    # c10/core/impl/alloc_cpu.cpp: alloc_cpu; "not enough memory" on Windows.
    (HOST, ("defaultcpuallocator: can't allocate memory",)),
    (HOST, ("defaultcpuallocator: not enough memory",)),
    # aten/src/ATen/MapAllocator.cpp: mmap of a file or of shared memory; errno 12.
    (HOST, ("unable to mmap", "cannot allocate memory")),
    # C++'s own error, which torch/csrc/Exceptions.h: CATCH_CORE_ERRORS passes on.
    (HOST, ("std::bad_alloc",)),
    # c10/util/Exception.h: OutOfMemoryError, whose name may be all that is left in the text.
    ("GPU memory", ("outofmemoryerror",)),
)
"""Maps the kind of memory that ran out to words in a library's message: all must occur, in upper or lower case."""

_FATAL = (
    *("illegal memory access", "device-side assert triggered", "unspecified launch failure", "misaligned address"),
    *("illegal instruction", "uncorrectable ecc error", "invalid device context"),
)
"""After these errors the CUDA context is lost (CUDA Runtime API, cudaError_t: "This leaves the process in an
inconsistent state"): whatever else the message says, freeing memory does not help (``cudaGetErrorString``)."""


def kind_of_text(text: str) -> str | None:
    """Returns which memory ran out, according to a library's message; None for any other message.

    >>> kind_of_text("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    'cuBLAS workspace'
    """
    lowered = text.lower()
    if any(words in lowered for words in _FATAL):
        return None
    return next((kind for kind, words in _SIGNS if all(word in lowered for word in words)), None)


def kind_of(error: BaseException) -> str | None:
    """Returns which memory ran out; None for any other error, such as a lost CUDA context."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return "GPU memory"
    if isinstance(error, MemoryError):
        return HOST
    return kind_of_text(str(error)) if isinstance(error, RuntimeError) else None


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error means that memory ran out."""
    return kind_of(error) is not None


def release() -> None:
    """Releases unreferenced memory. Call it outside the ``except`` block, since a traceback's frames hold tensors.
    ``torch.cuda.empty_cache`` does nothing if CUDA was never used."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True, slots=True)
class RanOut:
    """An attempt that ran out of memory."""

    error: Exception
    """The error; a note with the text of its traceback replaces the traceback."""
    message: str
    """The first line of the library's message."""


def attempt(work: Callable[[], Result]) -> Result | RanOut:
    """Calls ``work`` once; returns a RanOut if memory ran out, and frees what the attempt held. Raises other errors."""
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        full = RanOut(error=error, message=next(iter(str(error).splitlines()), type(error).__name__))
    # The traceback's frames, and those of the errors that led to it, hold the failed attempt's tensors. Even a frame
    # with cleared variables holds its function, and a closure (checkpointing's recompute) holds the graph.
    seen: set[int] = set()
    left: list[BaseException | None] = [full.error]
    while left:
        if (each := left.pop()) is not None and id(each) not in seen:
            seen.add(id(each))
            each.add_note("".join(traceback.format_tb(each.__traceback__)))
            traceback.clear_frames(each.__traceback__)
            each.__traceback__ = None
            left += (each.__cause__, each.__context__)
    release()
    return full
