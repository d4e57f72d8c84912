"""Tiny model folders of several architectures, for tests that must not depend on one."""

import json
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


VISION_FAMILIES = ("qwen2_5_vl", "gemma3", "smolvlm", "llava")
IMAGE_TOKEN = 300
"""Of all of them; the tokens that stand around images have the ids after it."""


def tiny_vision_folder(path: Path, family: str) -> Path:
    """Make a model of two layers that reads images, and as many that read text; without a tokenizer.

    Beside it lies what makes pixels of images: ``rehearsal.model.image_processor.rehearsed_processor`` makes a whole
    processor of the folder.
    """
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    config, preprocessor = tiny_vision_config(family)
    torch.manual_seed(0)
    logging.disable_progress_bar()
    try:
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():  # Gemma's projection: what an image holds would not matter
                torch.nn.init.normal_(parameter, std=0.02)
        model.save_pretrained(path)
    finally:
        logging.enable_progress_bar()
    (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return path


def tiny_vision_config(family: str) -> tuple[Any, dict[str, Any]]:
    """A model's config, and what its image processor reads: images of less than 100 pixels a side make few tokens."""
    from transformers import Gemma3Config, LlavaConfig, Qwen2_5_VLConfig, SmolVLMConfig

    if family == "qwen2_5_vl":
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
        places = {"video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
        vision = {"depth": 2, "num_heads": 4, "out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(
            text_config={**_TEXT, "rope_parameters": rope},
            vision_config={**_VISION, "patch_size": 14, **vision},
            image_token_id=IMAGE_TOKEN,
            **places,
        )
        sizes = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
        patches = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
        return config, {"image_processor_type": "Qwen2VLImageProcessor", **sizes, **patches}
    if family == "gemma3":
        sliding = {key: value for key, value in _GEMMA_LAYERS.items() if key != "query_pre_attn_scalar"}
        config = Gemma3Config(
            text_config={**_TEXT, "head_dim": 16, **sliding},
            vision_config={**_ENCODER, "image_size": 56, "patch_size": 14},
            mm_tokens_per_image=4,
            image_token_index=IMAGE_TOKEN,
            boi_token_index=301,
            eoi_token_index=302,
        )
        size = {"size": {"height": 56, "width": 56}, "image_seq_length": 4}
        return config, {"image_processor_type": "Gemma3ImageProcessor", **size}
    if family == "smolvlm":
        config = SmolVLMConfig(
            text_config={**_TEXT, "model_type": "llama"},
            vision_config={**_ENCODER, "image_size": 64, "patch_size": 16},
            scale_factor=2,
            image_token_id=IMAGE_TOKEN,
            pad_token_id=2,
        )
        size = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}, "do_image_splitting": True}
        return config, {"image_processor_type": "SmolVLMImageProcessor", **size}
    assert family == "llava"
    config = LlavaConfig(
        text_config={**_TEXT, "model_type": "llama"},
        vision_config={**_ENCODER, "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14},
        image_token_index=IMAGE_TOKEN,
    )
    edge = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    return config, {"image_processor_type": "CLIPImageProcessor", **edge}


_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_VISION = {"hidden_size": 64, "intermediate_size": 128}
_ENCODER = {**_VISION, "num_hidden_layers": 2, "num_attention_heads": 4}
