"""Estimates the memory that a training process holds on a device outside torch's allocator.

======================  ==============================  ==============================================================
what                    bytes                           depends on; source
======================  ==============================  ==============================================================
bare CUDA context       2.25 KiB per resident thread    SMs and threads per SM: the driver backs the local memory of
                                                        every thread that may be resident (NVIDIA forum, "Local memory
                                                        management"). No bare context in the figures is above it.
kernels loaded lazily   160 MiB, planned                what runs: torch's, cuBLAS's, attention's, bitsandbytes'.
                                                        48 MiB is the centre, 160 the most found: the figures.
kernels loaded eagerly  about 400 MiB more, not         ``CUDA_MODULE_LOADING=EAGER``: 942 MiB for 481 on an A100
                        planned for                     (stas00/ml-engineering), 636 for 274 (pytorch#86509). CUDA loads
                                                        lazily by default since 12.2 (CUDA Programming Guide, "Lazy
                                                        Loading"), torch since 1.13.
cuBLAS, cuBLASLt        0                               both take their workspaces from torch's allocator
                                                        (aten/src/ATen/cuda/CublasHandlePool.cpp), where
                                                        ``rehearsal.cuda.workspaces`` counts them. Lt has none of its
                                                        own: it reuses cuBLAS's, unless
                                                        ``TORCH_CUBLASLT_UNIFIED_WORKSPACE=0``
                                                        (torch.backends.cuda.blas_workspace_size, pytorch#168175).
NCCL                    0 for one process, else per     buffers of the protocols Simple, LL and LL128: 4 MiB +
                        communicator at most 9.2 MiB    8 x 512 x 8 x 16 + 120 x 640 x 8 x 8 bytes (NCCL's src/init.cc,
                        for each connection on each     DEFAULT_BUFFSIZE, DEFAULT_LL_BUFFSIZE, DEFAULT_LL128_BUFFSIZE).
                        channel                         A ring has 2 connections whatever its length, a tree up to 3
                                                        more (nccl#986): 24 channels of a ring are 441 MiB. Measured:
                                                        about 1.6 GB with the context after a first allreduce, about
                                                        6 GB with several communicators (nccl#864).
vLLM's engine           not here                        ``estimator.memory``
======================  ==============================  ==============================================================

nvidia-smi's per-process figure is all of these and what torch reserves. Beside processes it counts the driver's own
reserve, which torch's total leaves out (``detect.memory_of``).

No step shows between drivers: a T4 had 115 to 164 MiB where 14.74 GiB were left of it, 109 to 198 under the later
driver that leaves 14.56. A probe on the device replaces all of this.

**The figures** are in ``overhead_figures.csv``: every public one that was found of one process on a card that its
capacity names. A row says what the process was doing (``idle``: a context and little else; ``load``: weights; ``run``:
inference; ``train``: a training step), and torch's three words in an OOM message, found by its text, or nvidia-smi's
figure alone as what is in use. The rule was fitted to them, and the tests hold its claims against them. Left out are
those that hold more than kernels: processes of several GPUs (0.6 to 5.8 GiB, NCCL), vLLM's and SGLang's engines with
CUDA graphs (0.6 to 4.2 GiB), Fourier transforms and convolutions with their plans (1.6 GiB), and one that nothing
explains: 1.2 GiB on an A10G of 22.20 GiB that trained in 8 bit under torch 2.1 (meta-llama/llama-cookbook#320).
"""

from __future__ import annotations

from autotrain_mem.support.units import KIB, MIB

CONTEXT_BYTES_PER_THREAD = 9 * KIB // 4
COMMUNICATOR_BYTES = 700 * MIB
"""Bytes of each communicator of several GPUs. NVIDIA/nccl#964 measured 544 MiB for groups of 2 and 688 for groups of 3
and 4 on A100s with NVLink; it grows with the channels, and no further beyond 2 nodes (NVIDIA/nccl#986). A probe
measures it with the rest."""
KERNELS_BYTES = 160 * MIB
"""Planned: the most found, in inference with flash attention 3. With it the rule is above every figure: above half of
them by 35 % or less, at most by 156 % (99 MiB on an RTX 3060 that loads weights) or 235 MiB (contexts that idle)."""

_RESIDENT_THREADS = {
    (7, 0): 2048,
    (7, 5): 1024,
    (8, 0): 2048,
    (8, 6): 1536,
    (8, 7): 1536,
    (8, 9): 1536,
    (9, 0): 2048,
    (10, 0): 2048,
    (10, 3): 2048,
    (12, 0): 1536,
    (12, 1): 1536,
}
"""Most resident threads of one multiprocessor: CUDA C++ Programming Guide, technical specifications per capability."""


def overhead(multiprocessors: int, compute_capability: tuple[int, int]) -> int | None:
    """Bytes that a plan sets aside for one process; None for a compute capability that the table does not know.

    An A100 has 108 SMs of 2048 threads: a context of 486 MiB and 160 MiB of kernels, 646 in all. Found: 422 to 532.
    """
    threads = _RESIDENT_THREADS.get(compute_capability)
    if threads is None:
        return None
    return multiprocessors * threads * CONTEXT_BYTES_PER_THREAD + KERNELS_BYTES
