"""A model of a few hundred weights, for trainers that are built only to prepare data."""

from __future__ import annotations

from typing import Any


def smallest_model(*, classifier: bool = False) -> Any:
    """A causal language model, or a classifier with one score."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    config = Qwen2Config(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_labels=1,
    )
    return Qwen2ForSequenceClassification(config) if classifier else Qwen2ForCausalLM(config)
