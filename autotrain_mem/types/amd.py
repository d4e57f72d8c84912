"""Holds what AMD's architectures do otherwise than NVIDIA's compute capabilities, by the names that HIP gives them.

torch calls an AMD card ``cuda`` and makes up a compute capability for it, such as (9, 4) for gfx942, which says nothing
of its kernels: what tells is ``gcnArchName``. All of this is from published facts, as each constant says; nothing of it
was ever run on such a card.

====================  ==================================================================================================
allocator             torch's CUDA allocator, translated (``torch/utils/hipify``): the same sizes and the same choices.
                      Segments never grow: a build for ROCm has no ``PYTORCH_C10_DRIVER_API_SUPPORTED``, warns
                      "expandable_segments not supported on this platform" and goes on without them
                      (``c10/cuda/CUDAAllocatorConfig.h: expandable_segments``).
bfloat16, float16     matrix cores compute both on every architecture of the table (AMD matrix cores: CDNA2 and CDNA3
                      instruction set references, ``V_MFMA_F32_*_BF16_1K``; RDNA3's, ``V_WMMA_F32_16X16X16_BF16``).
float8                not used: no method here trains in it.
bitsandbytes          its wheels have kernels for every architecture of the table
                      (bitsandbytes' ``.github/scripts/build-rocm.sh: bnb_rocm_arch``), where they hold a library for
                      ROCm at all (``libbitsandbytes_rocm*.so``: 0.50.2 does, those before 0.49 do not).
attention             torch's own by AOTriton: ``rehearsal.cuda.attention_kernels``. flash-attention by name is another
                      package on ROCm, whose buffers are not known.
====================  ==================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from autotrain_mem.support.units import MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Describes what the cards of one of AMD's architectures have in common."""

    compute_units: int
    """Of its largest card, as a device of torch's: an upper bound for the others."""
    rocblas_bytes: int
    """Workspace of a rocBLAS handle: ``aten/src/ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize``, 128 MiB on
    gfx94x and gfx95x and 32 MiB elsewhere."""
    largest_head: int
    """Of torch's fused attention: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: aotriton_max_hdim``."""
    adds_queries_up: bool
    """Attention's backward may keep the query's gradient in float32 besides, in kernels written in assembly for this
    architecture (``.../transformers/cuda/attention_backward.cu``: ``DQ_ACC``, taken when a kernel asks for it)."""


HIPBLASLT_BYTES = 76 * MIB
"""``CublasHandlePool.cpp: parseCUDABlasLtWorkspaceSize``: hipBLASLt has a workspace of its own beside rocBLAS's."""

ARCHITECTURES = {
    "gfx90a": Architecture(compute_units=110, rocblas_bytes=32 * MIB, largest_head=512, adds_queries_up=False),
    "gfx942": Architecture(compute_units=304, rocblas_bytes=128 * MIB, largest_head=512, adds_queries_up=True),
    "gfx1100": Architecture(compute_units=96, rocblas_bytes=32 * MIB, largest_head=256, adds_queries_up=False),
}
"""MI210 and each die of MI250 and MI250X; MI300X and MI325X; RX 7900 and Radeon PRO W7900. AOTriton counts none of
these as experimental (``aotriton: v2src/util.cc: isArchExperimentallySupported``)."""


def architecture_name(gcn_arch_name: str) -> str:
    """Returns the name without the features that are switched on.

    >>> architecture_name("gfx90a:sramecc+:xnack-")
    'gfx90a'
    """
    return gcn_arch_name.partition(":")[0]
