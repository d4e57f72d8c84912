"""Estimates the memory that a training process holds on a device outside torch's allocator; a probe measures it.

- **A bare CUDA context**: 2.25 KiB per resident thread, since the driver backs the local memory of every thread that
  may be resident (NVIDIA forum, "Local memory management"). No idle process in ``overhead_figures.csv`` holds more.
- **Kernels**: 160 MiB. They are loaded when first used (CUDA Programming Guide, "Lazy Loading"). Processes that are not
  idle hold 42 MiB beyond a context at the median and 160 MiB at most, so kernels that a run first uses after its probe
  fit the default headroom of 400 MiB. ``CUDA_MODULE_LOADING=EAGER`` takes some 400 MiB more, which no plan includes:
  942 MiB instead of 481 on an A100 (stas00/ml-engineering), 636 instead of 274 (pytorch#86509).
- **cuBLAS, cuBLASLt**: 0. Their workspaces are in torch's allocator (``rehearsal.cuda.workspaces``).
- **NCCL**: 0 for one process; else see :data:`COMMUNICATOR_BYTES`. A probe measures it too.
- **vLLM's engine**: see ``estimator.vllm_share``.

nvidia-smi's figure for a process is the sum of these and what torch reserves. It also counts the driver's own reserve,
which torch's total omits (``nvml.memory_of``).

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
