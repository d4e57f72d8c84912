"""What libraries say when memory ran out is told from what they say when something else is wrong."""

import gc
import weakref

import pytest
import torch

from autotrain_mem.training.cuda_oom import RanOut, attempt, is_out_of_memory, kind_of, kind_of_text

SAID = {
    "CUDA out of memory. Tried to allocate 92.00 MiB. GPU 0 has a total capacity of 7.79 GiB": "GPU memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "cuBLAS workspace",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": "cuBLAS workspace",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(handle)`": "cuBLAS workspace",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED": "cuDNN workspace",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED": "cuDNN workspace",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED": "host memory",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`": "cuSOLVER workspace",
    "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`": "cuSPARSE workspace",
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error, NCCL version 2.20.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'": "NCCL buffer",
    "node:2134736:2285781 [0] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'": "NCCL buffer",
    "Failed to CUDA calloc async 4 bytes": "NCCL buffer",
    "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory.": "GPU memory",
    "Error out of memory at line 88 in file /src/csrc/ops.cu": "bitsandbytes buffer",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported": "CUDA runtime memory",
    "CUDA driver error: out of memory": "CUDA driver memory",
    "Triton Error [CUDA]: out of memory": "CUDA driver memory",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000000000000 bytes. Error code 12 (Cannot allocate memory)": "host memory",
    "unable to mmap 1024 bytes from file </torch_1>: Cannot allocate memory (12)": "host memory",
    "std::bad_alloc": "host memory",
}
NOT_MEMORY = (
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasGemmEx(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "NCCL error in: NCCLUtils.hpp:275, unhandled cuda error\nLast error:\nCuda failure 1 'invalid argument'",
    "CUDA error: an illegal memory access was encountered, after CUDA out of memory",
    "OutOfMemoryError: CUDA error: an illegal memory access was encountered",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
)


def test_what_a_library_says_names_whose_memory_ran_out() -> None:
    assert {text: kind_of_text(text) for text in SAID} == SAID
    assert {text: kind_of(RuntimeError(text)) for text in SAID} == SAID


def test_a_lost_context_and_other_errors_are_no_shortage() -> None:
    assert [text for text in NOT_MEMORY if is_out_of_memory(RuntimeError(text))] == []


def test_types_speak_for_themselves_and_only_what_libraries_raise_is_read() -> None:
    assert kind_of(torch.OutOfMemoryError("")) == "GPU memory"
    assert kind_of(MemoryError()) == "host memory"
    assert kind_of(ValueError("CUDA out of memory.")) is None
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert kind_of(caught.value) == "host memory"


def test_neither_an_attempt_that_failed_nor_what_led_to_its_error_holds_anything() -> None:
    seen = []

    def hold(error: Exception) -> None:
        held = torch.zeros(3)
        seen.append(weakref.ref(held))
        raise error

    def caught(error: Exception) -> Exception:
        with pytest.raises(type(error)) as raised:
            hold(error)
        return raised.value

    def work() -> None:
        own = torch.zeros(3)
        seen.append(weakref.ref(own))
        cause = caught(KeyError())
        enclosed = torch.zeros(3)
        seen.append(weakref.ref(enclosed))

        def recompute() -> None:
            hold(IndexError(enclosed.shape))

        try:
            recompute()
        except IndexError:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried") from cause

    gc.disable()
    try:
        outcome = attempt(work)
    finally:
        gc.enable()
    assert isinstance(outcome, RanOut)
    assert outcome.message == "CUDA out of memory."
    assert "in work" in outcome.error.__notes__[0]
    assert [each() for each in seen] == [None] * 4


def test_an_attempt_gives_what_it_gave_and_passes_other_errors_on() -> None:
    assert attempt(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 // 0)
