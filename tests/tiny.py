"""Tiny model folders of several architectures, for tests that must not depend on one."""

from pathlib import Path
from typing import Any

from autotrain_mem.quickstart import data, model

FAMILIES = ("qwen2", "qwen3", "llama", "gemma3", "gpt2")
WINDOW = 16
"""Tokens that Gemma's sliding layers look back; shorter than the rows of most tests."""


def tiny_folder(path: Path, family: str) -> Path:
    """Make a folder that ``from_pretrained`` loads offline: hidden size 64, the quickstart's tokenizer."""
    tokenizer = model.train_tokenizer(data.texts(data.problems(100, seed=0)))
    model.write_model(path, tiny_config(family), tokenizer)
    return path


def tiny_config(family: str) -> Any:
    """2 layers; of Gemma's text model one layer that slides and one that does not."""
    from transformers import (
        BartConfig,
        Gemma3TextConfig,
        GPT2Config,
        LlamaConfig,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    shared = {"vocab_size": model.VOCABULARY_SIZE, "tie_word_embeddings": True, **model.special_token_ids()}
    if family == "gpt2":
        return GPT2Config(n_positions=model.CONTEXT_LENGTH, n_embd=64, n_layer=2, n_head=4, **shared)
    if family == "bart":
        sizes = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128}
        decodes = {"is_decoder": True, "is_encoder_decoder": False, "dropout": 0.0, "encoder_layers": 1}
        return BartConfig(max_position_embeddings=model.CONTEXT_LENGTH, **sizes, **decodes, **shared)
    kind, more = {
        "qwen2": (Qwen2Config, {}),
        "qwen3": (Qwen3Config, {"head_dim": 16}),
        "llama": (LlamaConfig, {}),
        "gemma3": (Gemma3TextConfig, {"head_dim": 16, **_GEMMA_LAYERS}),
        "qwen3_moe": (Qwen3MoeConfig, {"head_dim": 16, **_EXPERTS}),
    }[family]
    return kind(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=model.CONTEXT_LENGTH,
        **shared,
        **more,
    )


_GEMMA_LAYERS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
