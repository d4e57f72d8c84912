"""Counts a model's parameters, and what a token takes of its KV cache, from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BIASED, _NORMED = "qwen2", "qwen3"
"""Query, key and value have a bias (``transformers/models/qwen2/modeling_qwen2.py: Qwen2Attention``), or a norm over
each head (``qwen3/modeling_qwen3.py: Qwen3Attention``)."""
_KNOWN = ("llama", "mistral", _BIASED, _NORMED)
"""Model types whose layers are those that :func:`parameters` counts."""
_OTHERWISE = ("attention_bias", "mlp_bias", "quantization_config")
"""Keys that say of such a model that its layers are others."""


def parameters(config: Mapping[str, Any]) -> int | None:
    """Counts the parameters of a decoder by its ``config.json``; None for one that is built otherwise.

    Example: 494,032,768 for Qwen2.5-0.5B.
    """
    try:
        kind, hidden, heads = config["model_type"], int(config["hidden_size"]), int(config["num_attention_heads"])
        layers, inner, words = (int(config[n]) for n in ("num_hidden_layers", "intermediate_size", "vocab_size"))
        ties = config.get("tie_word_embeddings", False)
    except (KeyError, TypeError, ValueError):
        return None
    if kind not in _KNOWN or any(config.get(name) for name in _OTHERWISE):
        return None
    head = int(config.get("head_dim") or hidden // heads)
    keys = 2 * head * int(config.get("num_key_value_heads") or heads)
    projections = head * heads + keys
    extra = {_BIASED: projections, _NORMED: 2 * head}.get(kind, 0)
    layer = hidden * (projections + head * heads) + extra + 3 * hidden * inner + 2 * hidden
    return words * hidden * (1 if ties else 2) + layers * layer + hidden


def kv_cache(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Counts the heads of keys and values, and the elements of a token for each of them in all layers.

    None where layers keep something else: latents (``kv_lora_rank``), or states of linear attention.

    Example: 2 heads and 2 * 24 * 64 elements for Qwen2.5-0.5B, so that a token takes 12 KiB in half precision.
    """
    try:
        heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
        head = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    except (KeyError, TypeError, ValueError):
        return None
    kinds = {str(kind) for kind in config.get("layer_types") or ()}
    if config.get("kv_lora_rank") or any("attention" not in kind or "linear" in kind for kind in kinds):
        return None
    return int(config.get("num_key_value_heads") or heads), 2 * layers * head
