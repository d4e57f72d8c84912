"""Models whose weights take no disk: files of the right length that hold nothing, which reads as zeros."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from gpu_records.models import MODELS

SMALL = "qwen2-small"
SHALLOW = "qwen2-8-layers"
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    **MODELS,
    # Qwen2.5-0.5B with a third of its layers, for trainings of many steps.
    SHALLOW: (MODELS["qwen2-0.5b"][0], {**MODELS["qwen2-0.5b"][1], "num_hidden_layers": 8}),
    # Small enough to be rehearsed in seconds, wide enough for large blocks to make the peak.
    SMALL: (
        "Qwen2Config",
        {
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "vocab_size": 32768,
            "tie_word_embeddings": True,
        },
    ),
}
BYTES_OF = {"BF16": 2}


def config_of(name: str) -> Any:
    """The model's config, with the special tokens that a rehearsal's tokenizer has room for."""
    import transformers

    from autotrain_mem.quickstart.model import special_token_ids

    kind, sizes = SIZES[name]
    return getattr(transformers, kind)(**sizes, **special_token_ids(), dtype="bfloat16")


def sparse_folder(root: Path, name: str) -> Path:
    """The model's folder, made now if it is not there; ``from_pretrained`` loads it, in bfloat16."""
    folder = root / name
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for parameter, tensor in model.named_parameters():
        begin, end = end, end + tensor.numel() * BYTES_OF["BF16"]
        header[parameter] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    config.save_pretrained(folder)
    unfinished = folder / ".unfinished"
    with unfinished.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    unfinished.rename(folder / "model.safetensors")
    return folder
