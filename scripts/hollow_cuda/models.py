"""Writes models whose weights take no disk space: sparse files of the right length, which read as zeros."""

import json
import struct
from pathlib import Path
from typing import Any

from gpu_records.models import MODELS, sizes

SMALL = "qwen2-small"
SHALLOW = "qwen2-8-layers"
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    **MODELS,
    # Qwen2.5-0.5B with a third of its layers, for training many steps.
    SHALLOW: (MODELS["qwen2-0.5b"][0], {**MODELS["qwen2-0.5b"][1], "num_hidden_layers": 8}),
    # Small enough to be rehearsed in seconds, wide enough for large blocks to make the peak.
    SMALL: ("Qwen2Config", sizes(512, 2048, 4, 8, 2, 4096, 32768)),
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
            **{"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": True},
            **{"size": {"longest_edge": 768}, "max_image_size": {"longest_edge": 384}},
        },
    ),
}
"""Small models that read images: a config's class, its sizes, and the settings of its image processor."""


def sparse_folder(root: Path, name: str) -> Path:
    """Returns a folder that ``from_pretrained`` loads in bfloat16; writes it if it is missing."""
    folder = root / name
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    import transformers

    from autotrain_mem.cli.tiny_model import special_token_ids

    folder.mkdir(parents=True, exist_ok=True)
    special = special_token_ids()  # within the vocabulary of a rehearsal's tokenizer
    if name in VISION:
        kind, fields, processor = VISION[name]
        fields = {**fields, "text_config": {**fields["text_config"], **special}}
        (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    else:
        kind, fields = SIZES[name]
    config = getattr(transformers, kind)(**fields, **special, dtype="bfloat16")
    auto = transformers.AutoModelForImageTextToText if name in VISION else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.bfloat16)
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
