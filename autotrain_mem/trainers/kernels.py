"""Says which kernels by name a trainer may run: those that a card has, and that a rehearsal imitates."""

from __future__ import annotations

from typing import Any

import torch

from autotrain_mem.types.hardware import Capability

_HUB_NAMES = ("flash-attn2", "flash-attn3", "vllm-flash-attn3")
FLASH_NAMES = ("flash_attention_2", "flash_attention_3", *(f"kernels-community/{name}" for name in _HUB_NAMES))
"""Of ``trl/trainer/sft_trainer.py: FLASH_ATTENTION_VARIANTS``, those that a rehearsal imitates."""


def why_no_attention(
    attn_implementation: str | None, compute_capability: Capability, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Says why this attention cannot run, or cannot be rehearsed, on such a card; None when it can.

    Args:
        dtype: What attention computes in: autocast's type where that is on.
        head_dim: The model's largest head size.
    """
    if attn_implementation in (None, "eager", "sdpa"):
        return None
    if attn_implementation not in FLASH_NAMES:
        return f"{attn_implementation} is not rehearsed: take sdpa, which CUDA runs by its own flash kernel"
    if isinstance(compute_capability, str):
        return "flash-attention by name is another package on AMD's cards, whose buffers are not known"
    if compute_capability < (8, 0):
        major, minor = compute_capability
        return f"flash-attention needs compute capability 8.0 or newer; this card has {major}.{minor}"
    if "3" in attn_implementation and compute_capability[0] >= 10:
        return "flash-attention 3 runs on cards of compute capability 8.x and 9.x only"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attention computes in float16 or bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if head_dim > 256:
        return f"flash-attention takes heads of at most 256; this model's have {head_dim}"
    return None


LIGER_MODELS = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""``config.model_type`` of the models whose layers are imitated."""

LIGER_SWITCHES = {"rope": True, "rms_norm": True, "swiglu": True, "geglu": True, "fused_linear_cross_entropy": True}
"""The switches of ``liger_kernel_config``, with their defaults (``apply_liger_kernel_to_llama`` and its like)."""


def why_not_liger(model_type: str, config: dict[str, Any] | None = None) -> str | None:
    """Says why ``use_liger_kernel`` cannot be rehearsed for a model and a ``liger_kernel_config``; None if it can."""
    if model_type not in LIGER_MODELS:
        return f"Liger's kernels are rehearsed for {', '.join(LIGER_MODELS)}, not for {model_type}"
    unknown = sorted(name for name, on in (config or {}).items() if on and name not in LIGER_SWITCHES)
    return f"not rehearsed: liger_kernel_config {', '.join(unknown)}" if unknown else None
