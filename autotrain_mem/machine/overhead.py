"""Estimates the memory that a training process holds on a device outside torch's allocator; a probe measures it.

- **A bare CUDA context**: 2.25 KiB per resident thread, since the driver backs the local memory of every thread that
  may be resident (NVIDIA forum, "Local memory management"). No idle process in ``overhead_figures.csv`` holds more.
- **Kernels**: 160 MiB for those of torch, cuBLAS, attention and bitsandbytes, loaded lazily. Beyond a context,
  processes that are not idle hold 42 MiB at the median and 160 MiB at most. ``CUDA_MODULE_LOADING=EAGER`` takes some
  400 MiB more, which no plan includes: 942 MiB instead of 481 on an A100 (stas00/ml-engineering), 636 instead of 274
  (pytorch#86509). CUDA loads lazily since 12.2 (CUDA Programming Guide, "Lazy Loading"), torch since 1.13.
- **cuBLAS, cuBLASLt**: 0. Both take their workspaces from torch's allocator (aten/src/ATen/cuda/CublasHandlePool.cpp),
  where ``rehearsal.cuda.workspaces`` counts them. Lt reuses cuBLAS's, unless
  ``TORCH_CUBLASLT_UNIFIED_WORKSPACE=0`` (torch.backends.cuda.blas_workspace_size, pytorch#168175).
- **NCCL**: 0 for one process. Else at most 9.2 MiB per communicator, channel and connection, for the buffers of the
  protocols Simple, LL and LL128: 4 MiB + 8 x 512 x 8 x 16 + 120 x 640 x 8 x 8 bytes (NCCL's src/init.cc,
  DEFAULT_BUFFSIZE, DEFAULT_LL_BUFFSIZE, DEFAULT_LL128_BUFFSIZE). A ring has 2 connections whatever its length, a tree
  up to 3 more (nccl#986): 24 channels of a ring take 441 MiB. Measured: about 1.6 GB with the context after a first
  allreduce, about 6 GB with several communicators (nccl#864).
- **vLLM's engine**: see ``estimator.vllm_share``.

nvidia-smi's figure for a process is the sum of these and what torch reserves. It also counts the driver's own reserve,
which torch's total omits (``nvml.memory_of``). Driver versions make no difference: a T4 had 115 to 164 MiB under a
driver that leaves 14.74 GiB of it, and 109 to 198 under a later one that leaves 14.56.

``overhead_figures.csv`` has every public figure for a single process on a card that its capacity identifies: what the
process was doing (``idle``, ``load`` weights, ``run`` inference, ``train``), and either the sizes in its OOM message
(search for that text) or nvidia-smi's figure. The rule is fitted to them, and the tests check it against them.
Excluded are processes of several GPUs (0.6 to 5.8 GiB, NCCL), engines of vLLM and SGLang with CUDA graphs (0.6 to 4.2
GiB), Fourier transforms and convolutions with their plans (1.6 GiB), and one unexplained case: 1.2 GiB on an A10G of
22.20 GiB that trained in 8 bit under torch 2.1 (meta-llama/llama-cookbook#320).
"""

from autotrain_mem.support.units import KIB, MIB

CONTEXT_BYTES_PER_THREAD = 9 * KIB // 4
COMMUNICATOR_BYTES = 700 * MIB
"""Bytes of each communicator of several GPUs. NVIDIA/nccl#964 measured 544 MiB for groups of 2 and 688 for groups of 3
and 4 on A100s with NVLink; it grows with the channels, but not beyond 2 nodes (NVIDIA/nccl#986)."""
KERNELS_BYTES = 160 * MIB
"""The largest figure found: inference with flash attention 3. With it :func:`overhead` exceeds every figure, half of
them by 35 % or less, and at most by 156 % (of 99 MiB: an RTX 3060 loads weights) or 235 MiB (an RTX 5090 infers)."""

_RESIDENT_THREADS = {
    (7, 5): 1024,
    **dict.fromkeys([(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)], 1536),
    **dict.fromkeys([(7, 0), (8, 0), (9, 0), (10, 0), (10, 3)], 2048),
}
"""Most resident threads of one multiprocessor: CUDA C++ Programming Guide, technical specifications per capability."""


def overhead(multiprocessors: int, compute_capability: tuple[int, int]) -> int | None:
    """Returns the bytes that a plan reserves for one process; None for an unknown compute capability.

    An A100 has 108 SMs of 2048 threads: a context of 486 MiB and 160 MiB of kernels, 646 MiB in all. The public
    figures are 422 to 532 MiB.
    """
    threads = _RESIDENT_THREADS.get(compute_capability)
    return None if threads is None else multiprocessors * threads * CONTEXT_BYTES_PER_THREAD + KERNELS_BYTES
