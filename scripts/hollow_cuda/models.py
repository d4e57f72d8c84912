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

_TEXT = SIZES[SMALL][1]
_TOWER = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "num_hidden_layers": 4}
VISION: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl-small": (
        "Qwen2_5_VLConfig",
        {
            "text_config": {
                **_TEXT,
                "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6},
            },
            "vision_config": {
                **{"depth": 4, "hidden_size": 384, "out_hidden_size": 512, "intermediate_size": 1536, "num_heads": 6},
                **{"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1, 3]},
            },
            **{"image_token_id": 1001, "video_token_id": 1002, "vision_start_token_id": 1003},
            **{"vision_end_token_id": 1004, "tie_word_embeddings": True},
        },
        {
            **{"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2},
            **{"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280},
        },
    ),
    "gemma3-vl-small": (
        "Gemma3Config",
        {
            "text_config": {**_TEXT, "head_dim": 64, "sliding_window": 512, "query_pre_attn_scalar": 64},
            "vision_config": {**_TOWER, "image_size": 448, "patch_size": 14},
            **{"mm_tokens_per_image": 64, "image_token_index": 1001, "boi_token_index": 1002, "eoi_token_index": 1003},
        },
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 448, "width": 448}, "image_seq_length": 64},
    ),
    "smolvlm-small": (
        "SmolVLMConfig",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_TOWER, "image_size": 384, "patch_size": 16},
            **{"scale_factor": 4, "image_token_id": 1001, "tie_word_embeddings": True},
        },
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "do_image_splitting": True,
            "size": {"longest_edge": 768},
            "max_image_size": {"longest_edge": 384},
        },
    ),
}
"""Small models that read images: a config's class, its sizes, and the settings of its image processor."""


def config_of(name: str) -> Any:
    """The model's config, with the special tokens that a rehearsal's tokenizer has room for."""
    import transformers

    from autotrain_mem.cli.tiny_model import special_token_ids

    special = special_token_ids()
    if name not in VISION:
        kind, sizes = SIZES[name]
        return getattr(transformers, kind)(**sizes, **special, dtype="bfloat16")
    kind, sizes, _ = VISION[name]
    text = {**sizes["text_config"], **special}
    return getattr(transformers, kind)(**{**sizes, "text_config": text}, **special, dtype="bfloat16")


def sparse_folder(root: Path, name: str) -> Path:
    """The model's folder, made now if it is not there; ``from_pretrained`` loads it, in bfloat16."""
    folder = root / name
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(name)
    with torch.device("meta"):
        kind = AutoModelForImageTextToText if name in VISION else AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.bfloat16)
    if name in VISION:
        (folder / "preprocessor_config.json").write_text(json.dumps(VISION[name][2]), encoding="utf-8")
    config.architectures = [type(model).__name__]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for parameter, tensor in model.named_parameters():
        begin, end = end, end + tensor.numel() * 2
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
