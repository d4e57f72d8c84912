"""The recipes' models as their sizes alone, so that the suite needs nobody's files; and each of them tiny."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FACTS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "Qwen/Qwen2.5-7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
    "Qwen/Qwen3-8B": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    "google/gemma-3-1b-it": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "vocab_size": 262144,
    },
    "meta-llama/Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
}
"""What memory depends on, of each model's config.json."""

CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TINY = {"gemma3_text": "gemma3", "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""What ``tiny.tiny_folder`` calls the family."""


def write_config(models: Path, name: str) -> Path:
    """``ORG/NAME/config.json`` of a model in real size, which planning needs and nothing more."""
    facts = FACTS[name]
    written = {**facts, "architectures": [CLASSES[facts["model_type"]]], "torch_dtype": "bfloat16"}
    folder = models / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(written))
    return folder
