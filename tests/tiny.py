"""Tiny model folders of several architectures, for tests that must not depend on one."""

from pathlib import Path
from typing import Any

from autotrain_mem.quickstart import data, model

FAMILIES = ("qwen2", "llama", "gpt2")


def tiny_folder(path: Path, family: str) -> Path:
    """Make a folder that ``from_pretrained`` loads offline: 2 layers, hidden size 64, the quickstart's tokenizer."""
    tokenizer = model.train_tokenizer(data.texts(data.problems(100, seed=0)))
    model.write_model(path, tiny_config(family), tokenizer)
    return path


def tiny_config(family: str) -> Any:
    from transformers import GPT2Config, LlamaConfig, Qwen2Config

    shared = {"vocab_size": model.VOCABULARY_SIZE, "tie_word_embeddings": True, **model.special_token_ids()}
    if family == "gpt2":
        return GPT2Config(n_positions=model.CONTEXT_LENGTH, n_embd=64, n_layer=2, n_head=4, **shared)
    kind = {"qwen2": Qwen2Config, "llama": LlamaConfig}[family]
    return kind(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=model.CONTEXT_LENGTH,
        **shared,
    )
