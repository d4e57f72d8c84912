"""Says what of a model an adapter should adapt, and how large it gets, from the model's config alone."""

from __future__ import annotations

from typing import Any

from autotrain_mem.methods.configs import ATTENTION, has_experts


def planned_targets(config: Any) -> str:
    """Names the modules that an adapter adapts where a plan turns LoRA on: all linear layers.

    Of a mixture of experts those of attention: PEFT 0.21 adapts fused experts as parameters, without dropout only
    (``peft/tuners/lora/layer.py: ParamWrapper``).
    """
    return ATTENTION if has_experts(config) else "all-linear"


def adapter_width(config: Any) -> int | None:
    """Counts the parameters of an adapter of rank 1 on :func:`planned_targets`: inputs and outputs of each layer.

    It is that of decoders with a gated MLP, which most are; others are off by less than a half, and a rank goes in
    powers of two. None where the config lacks a size.

    Example: Qwen2.5-0.5B has 549,888, so that rank 16 trains 8.8 million parameters.
    """
    text = config.get_text_config()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sizes = [size for name in names if isinstance(size := getattr(text, name, None), int) and size > 0]
    if len(sizes) < len(names):
        return None
    hidden, layers, heads, inner = sizes
    head = getattr(text, "head_dim", None) or hidden // heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    attention = 2 * (hidden + heads * head) + 2 * (hidden + keys * head)
    feed_forward = 0 if has_experts(config) else 3 * (hidden + inner)
    return int(layers * (attention + feed_forward))


def checkpoint_dtype(config: Any) -> str | None:
    """``bfloat16``: the dtype that transformers wrote as it saved the weights."""
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")
