"""What a training process holds on a device outside torch's allocator.

======================  ==============================  ==============================================================
what                    bytes                           depends on; source
======================  ==============================  ==============================================================
bare CUDA context       2.25 KiB per resident thread    SMs and threads per SM: the driver backs the local memory of
                                                        every thread that may be resident (NVIDIA forum, "Local memory
                                                        management"). No bare context in ``FIGURES`` is above it.
kernels loaded lazily   160 MiB, planned                what runs: torch's, cuBLAS's, attention's, bitsandbytes'.
                                                        48 MiB is the centre, 160 the most found: ``FIGURES``.
kernels loaded eagerly  about 400 MiB more, not         ``CUDA_MODULE_LOADING=EAGER``: 942 MiB for 481 on an A100
                        planned for                     (stas00/ml-engineering), 636 for 274 (pytorch#86509). CUDA loads
                                                        lazily by default since 12.2 (CUDA Programming Guide, "Lazy
                                                        Loading"), torch since 1.13. A measurement sees the setting.
cuBLAS, cuBLASLt        0                               both take their workspaces from torch's allocator
                                                        (aten/src/ATen/cuda/CublasHandlePool.cpp), where
                                                        ``rehearsal.cuda.workspaces`` counts them. Lt has none of its
                                                        own: it reuses cuBLAS's, unless
                                                        ``TORCH_CUBLASLT_UNIFIED_WORKSPACE=0``
                                                        (torch.backends.cuda.blas_workspace_size, pytorch#168175).
NCCL                    0 for one process               else :func:`nccl_bytes`, per communicator
vLLM's engine           not here                        ``estimator.vllm_share``
======================  ==============================  ==============================================================

nvidia-smi's per-process figure is all of these and what torch reserves. Beside processes it counts the driver's own
reserve, which torch's total leaves out (``detect._memory``).

No step shows between drivers: a T4 had 115 to 164 MiB where 14.74 GiB were left of it, 109 to 198 under the later
driver that leaves 14.56. A measurement on the device replaces all of this: see ``measure``.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotrain_mem.units import GIB, KIB, MIB

CONTEXT_BYTES_PER_THREAD = 9 * KIB // 4
CENTRAL_KERNELS_BYTES = 48 * MIB
"""The centre: what 21 training processes held beyond the context, from 18 to 143 MiB. With it the rule meets half of
the 56 ``FIGURES`` within 7.6 %; the others are up to 112 MiB above and 123 below it."""
KERNELS_BYTES = 160 * MIB
"""Planned: the most found, in inference with flash attention 3. With it the rule is above every figure: above half of
them by 35 % or less, at most by 156 % (99 MiB on an RTX 3060 that loads weights) or 235 MiB (contexts that idle)."""
MI300X_BYTES = 800 * MIB
"""0.78 GiB: a public HIP OOM log with 191.69 GiB total, 186.02 GiB free and 4.89 GiB allocated by torch."""

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
}
"""Most resident threads of one multiprocessor: CUDA C++ Programming Guide, technical specifications per capability."""

_NCCL_BUFFER_BYTES = 4 * MIB + 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8
"""Of one connection on one channel, for the protocols Simple (``NCCL_BUFFSIZE``), LL and LL128: NCCL's src/init.cc,
``DEFAULT_BUFFSIZE``, ``DEFAULT_LL_BUFFSIZE``, ``DEFAULT_LL128_BUFFSIZE``. 9.2 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """One process's share of a device that torch's allocator does not see."""

    context_bytes: int
    kernels_bytes: int
    nccl_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """What a plan sets aside."""
        return self.context_bytes + self.kernels_bytes + self.nccl_bytes


def overhead(multiprocessors: int, compute_capability: tuple[int, int]) -> Overhead | None:
    """By the table above; None for a compute capability that it does not know.

    An A100 has 108 SMs of 2048 threads: a context of 486 MiB and 160 MiB of kernels, 646 in all. Found: 422 to 532.
    """
    threads = _RESIDENT_THREADS.get(compute_capability)
    if threads is None:
        return None
    return Overhead(context_bytes=multiprocessors * threads * CONTEXT_BYTES_PER_THREAD, kernels_bytes=KERNELS_BYTES)


def nccl_bytes(processes: int, channels: int, connections: int) -> int:
    """Buffers of one communicator, at most: every channel has one set for each connection.

    A ring has 2 connections whatever its length, a tree up to 3 more (nccl#986); 24 channels of a ring are 441 MiB.
    Measured: about 1.6 GB with the context after a first allreduce, about 6 GB with several communicators (nccl#864).
    """
    return 0 if processes == 1 else channels * connections * _NCCL_BUFFER_BYTES


# -- what was found --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figure:
    """One public figure. ``overhead`` was fitted to these; the tests hold its claims against them."""

    card: str
    doing: str
    """``idle``: a context and little else. ``load``: weights. ``run``: inference. ``train``: a training step."""
    in_use_gib: float
    allocated_gib: float
    unallocated_mib: float
    """The last three are torch's words in an OOM message; nvidia-smi's figure stands alone in the first."""
    source: str

    @property
    def found_bytes(self) -> int:
        """Outside torch. Messages round to 0.01 GiB, so this may be off by 10 MiB, or 15 with all three in GiB."""
        return round((self.in_use_gib - self.allocated_gib) * GIB - self.unallocated_mib * MIB)

    @property
    def predicted(self) -> Overhead:
        """By the rule."""
        found = overhead(*SIZES[self.card])
        assert found is not None
        return found


SIZES = {
    "A100": (108, (8, 0)),
    "B200": (148, (10, 0)),
    "H100": (132, (9, 0)),
    "H100 PCIe": (114, (9, 0)),
    "H200": (132, (9, 0)),
    "L4": (58, (8, 9)),
    "L40S": (142, (8, 9)),
    "RTX 3060": (28, (8, 6)),
    "RTX 3090": (82, (8, 6)),
    "RTX 4060 laptop": (24, (8, 9)),
    "RTX 4090": (128, (8, 9)),
    "RTX 5090": (170, (12, 0)),
    "RTX 6000 Ada": (142, (8, 9)),
    "RTX A6000": (84, (8, 6)),
    "RTX PRO 6000": (188, (12, 0)),
    "T4": (40, (7, 5)),
    "V100": (80, (7, 0)),
}
"""Multiprocessors and compute capability."""


def _smi(card: str, doing: str, mib: int, source: str) -> Figure:
    return Figure(card, doing, mib / 1024, 0.0, 0.0, source)


def _oom(card: str, doing: str, in_use: float, allocated: float, unallocated: float, source: str = "") -> Figure:
    """A message found by its text, of one process on one card; the card is known by its capacity, ``source`` in GiB."""
    return Figure(card, doing, in_use, allocated, unallocated, f"OOM message, {source} in use {in_use:.2f} GiB")


FIGURES = (
    _smi("A100", "idle", 481, "stas00/ml-engineering, torch 2.1"),
    _oom("A100", "load", 8.38, 7.96, 7.73, "39.49 GiB,"),
    _oom("A100", "train", 39.31, 38.33, 499.39, "39.49 GiB,"),
    _oom("A100", "train", 74.35, 73.25, 615.51, "79.25 GiB,"),
    _oom("A100", "run", 77.89, 55.51, 21.87 * 1024, "79.25 GiB,"),
    _oom("A100", "train", 79.14, 76.38, 2.24 * 1024, "79.25 GiB, torch 2.1,"),
    _oom("B200", "run", 168.34, 167.64, 4.62, "178.35 GiB,"),
    _oom("H100", "run", 77.95, 76.58, 714.13, "79.19 GiB,"),
    _oom("H100", "run", 79.09, 78.16, 198.54, "79.18 GiB, flash attention 3,"),
    _oom("H100 PCIe", "train", 79.13, 77.91, 648.28, "79.19 GiB,"),
    _oom("H200", "load", 139.60, 138.14, 824.86, "139.72 GiB,"),
    _oom("H200", "load", 139.20, 2.05, 136.64 * 1024, "139.81 GiB,"),
    _oom("H200", "train", 139.75, 138.59, 508.12, "139.81 GiB,"),
    _oom("L4", "load", 21.96, 21.69, 65.15, "22.03 GiB,"),
    _oom("L4", "train", 21.96, 21.65, 66.83, "22.03 GiB,"),
    _oom("L4", "run", 22.01, 21.62, 135.82, "22.03 GiB,"),
    _oom("L40S", "train", 44.47, 43.89, 79.61, "huggingface/sentence-transformers#3214,"),
    _oom("RTX 3060", "load", 11.54, 11.34, 105.47, "11.63 GiB,"),
    _smi("RTX 3090", "idle", 256, "InvokeAI#9413, torch 2.7"),
    _oom("RTX 3090", "load", 23.43, 23.13, 6.31, "23.56 GiB,"),
    _oom("RTX 3090", "run", 16.31, 16.01, 7.47, "23.69 GiB, torch 2.1,"),
    _oom("RTX 3090", "run", 19.81, 13.90, 5.61 * 1024, "23.69 GiB,"),
    _oom("RTX 3090", "run", 23.66, 21.84, 1.52 * 1024, "23.69 GiB, torch 2.1,"),
    _oom("RTX 3090", "train", 19.40, 17.97, 1.02 * 1024, "23.69 GiB,"),
    _oom("RTX 3090", "train", 23.68, 22.72, 567.06, "23.69 GiB, torch 2.1,"),
    _oom("RTX 3090", "train", 23.68, 23.04, 301.75, "23.69 GiB,"),
    _smi("RTX 4060 laptop", "train", 116, "ESRSchao/EdgeRegNet#2"),
    _oom("RTX 4090", "load", 23.46, 23.08, 0.97, "23.52 GiB,"),
    _oom("RTX 4090", "load", 23.48, 22.72, 257.71, "huggingface/lora-fast#1,"),
    _oom("RTX 4090", "run", 23.04, 21.37, 1.22 * 1024, "23.52 GiB,"),
    _smi("RTX 4090", "train", 504, "Phidias-Diffusion#8"),
    _oom("RTX 4090", "train", 22.39, 21.58, 350.11, "lrzjason/T2ITrainer#37,"),
    _oom("RTX 5090", "load", 31.30, 30.35, 319.13, "31.36 GiB,"),
    _oom("RTX 5090", "run", 31.28, 30.76, 33.46, "31.37 GiB,"),
    _oom("RTX 5090", "run", 31.29, 30.80, 2.80, "31.37 GiB,"),
    _oom("RTX 5090", "run", 16.63, 15.03, 1.00 * 1024, "31.36 GiB,"),
    _smi("RTX 6000 Ada", "idle", 426, "unsloth-zoo#1053, torch 2.10"),
    _smi("RTX 6000 Ada", "run", 429, "MTVCrafter#21"),
    _oom("RTX A6000", "train", 47.34, 45.65, 1.37 * 1024, "47.40 GiB,"),
    _oom("RTX PRO 6000", "run", 11.93, 11.24, 14.48, "94.97 GiB,"),
    _oom("RTX PRO 6000", "train", 94.50, 85.16, 8.66 * 1024, "94.97 GiB,"),
    _smi("T4", "run", 198, "OOM message, 14.57 GiB"),
    _oom("T4", "load", 14.50, 14.35, 44.44, "14.56 GiB,"),
    _oom("T4", "load", 14.55, 14.29, 119.36, "14.56 GiB,"),
    _oom("T4", "run", 11.50, 11.30, 71.79, "14.56 GiB,"),
    _oom("T4", "run", 14.37, 14.20, 59.17, "14.74 GiB,"),
    _oom("T4", "run", 14.71, 14.54, 10.14, "14.74 GiB,"),
    _oom("T4", "train", 12.28, 12.06, 93.12, "14.56 GiB,"),
    _oom("T4", "train", 14.37, 12.77, 1.45 * 1024, "14.74 GiB,"),
    _oom("T4", "train", 14.54, 13.90, 504.07, "14.56 GiB,"),
    _oom("T4", "train", 14.74, 14.31, 320.39, "14.74 GiB,"),
    _oom("V100", "load", 15.75, 14.89, 497.13, "15.77 GiB,"),
    _oom("V100", "run", 15.74, 15.29, 6.66, "15.77 GiB, torch 2.1,"),
    _oom("V100", "run", 16.95, 2.10, 14.46 * 1024, "31.73 GiB,"),
    _oom("V100", "train", 31.54, 28.49, 2.68 * 1024, "31.73 GiB,"),
    _oom("V100", "train", 31.72, 29.66, 1.68 * 1024, "31.73 GiB,"),
)
"""All that were found of one process on a card that its capacity names, but for these, which hold more than kernels:
processes of several GPUs (0.6 to 5.8 GiB, NCCL), vLLM's and SGLang's engines with CUDA graphs (0.6 to 4.2 GiB), Fourier
transforms and convolutions with their plans (1.6 GiB), and one that nothing explains: 1.2 GiB on an A10G of 22.20 GiB
that trained in 8 bit under torch 2.1 (meta-llama/llama-cookbook#320)."""
