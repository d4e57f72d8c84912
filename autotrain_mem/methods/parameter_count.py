"""Computes a model's parameters, the parameters of its adapters, and its KV cache per token from the config alone."""

from collections.abc import Mapping
from typing import Any

_BIASED, _NORMED = "qwen2", "qwen3"
"""The model type whose queries, keys and values have a bias (``transformers/models/qwen2/modeling_qwen2.py:
Qwen2Attention``), and the one whose heads have a norm (``qwen3/modeling_qwen3.py: Qwen3Attention``)."""
_KNOWN = ("llama", "mistral", _BIASED, _NORMED)
"""The model types with the layers that :func:`parameters` counts."""
_OTHERWISE = ("attention_bias", "mlp_bias", "quantization_config")
"""Config keys that, if set, give a model of these types other layers."""


def parameters(config: Mapping[str, Any]) -> int | None:
    """Computes the number of parameters of a decoder from its ``config.json``; None if its layers are not known.

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
    """Returns the number of key-value heads, and the elements of the KV cache per token and head over all layers.

    Returns None if layers cache latents (``kv_lora_rank``) or states of linear attention. Example: 2 heads and
    2 * 24 * 64 elements for Qwen2.5-0.5B.
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


def adapter_width(config: Any) -> int | None:
    """Computes the parameters of a rank-1 LoRA adapter on ``configs.planned_targets``: inputs plus outputs of each.

    The number is exact for decoders with a gated MLP, and off by less than half for others. Example: 549,888 for
    Qwen2.5-0.5B.
    """
    from autotrain_mem.methods.configs import has_experts

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
    """Returns the dtype of the saved weights, such as ``bfloat16``; None if the config does not state it."""
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")
