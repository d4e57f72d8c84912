"""Tiny model folders of several architectures, for tests that must not depend on one."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from autotrain_mem.cli import tiny_model, word_problems
from autotrain_mem.trainers import pretrained

FAMILIES = ("qwen2", "qwen3", "llama", "gemma3", "gpt2")
WINDOW = 16
"""Tokens that Gemma's sliding layers look back; shorter than the rows of most tests."""


def tiny_folder(path: Path, family: str) -> Path:
    """Make a folder that ``from_pretrained`` loads offline: hidden size 64, the quickstart's tokenizer."""
    tokenizer = tiny_model.train_tokenizer(word_problems.texts(word_problems.problems(100, seed=0)))
    tiny_model.write_model(path, tiny_config(family), tokenizer)
    return path


def pack_in_mxfp4(folder: Path) -> Path:
    """Save a tiny gpt-oss as the real one is saved: experts in blocks of 32 elements of 4 bits, with a scale each."""
    packed = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = weight
            continue
        experts, inner, outer = weight.shape
        packed[f"{name}_blocks"] = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        packed[f"{name}_scales"] = torch.full((experts, outer, inner // 32), 120, dtype=torch.uint8)
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tiny_config(family: str) -> Any:
    """2 layers; of Gemma's text model, and of gpt-oss, one layer that slides and one that does not."""
    shared = {"vocab_size": tiny_model.VOCABULARY_SIZE, "tie_word_embeddings": True, **tiny_model.special_token_ids()}
    if family == "gpt2":
        return transformers.GPT2Config(n_positions=tiny_model.CONTEXT_LENGTH, n_embd=64, n_layer=2, n_head=4, **shared)
    if family == "bart":
        sizes = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128}
        decodes = {"is_decoder": True, "is_encoder_decoder": False, "dropout": 0.0, "encoder_layers": 1}
        return transformers.BartConfig(max_position_embeddings=tiny_model.CONTEXT_LENGTH, **sizes, **decodes, **shared)
    kind, more = {
        "qwen2": (transformers.Qwen2Config, {}),
        "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
        "llama": (transformers.LlamaConfig, {}),
        "gemma3": (transformers.Gemma3TextConfig, {**_SLIDING, "query_pre_attn_scalar": 16}),
        "qwen3_moe": (transformers.Qwen3MoeConfig, {"head_dim": 16, **_EXPERTS}),
        "mixtral": (transformers.MixtralConfig, _LOCAL_EXPERTS),
        "gpt_oss": (transformers.GptOssConfig, {**_SLIDING, **_LOCAL_EXPERTS}),
    }[family]
    return kind(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tiny_model.CONTEXT_LENGTH,
        **shared,
        **more,
    )


_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "head_dim": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

VISION_FAMILIES = ("qwen2_5_vl", "gemma3", "smolvlm", "llava")
IMAGE_TOKEN = 540
"""The id of the token of images, of all of them: the first that the tokenizer of texts has not."""
_IN_TEMPLATE = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "smolvlm": "<image>",
    "llava": "<image>",
}
_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- 'MARK' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def tiny_vision_folder(path: Path, family: str) -> Path:
    """Make a model that reads images, which ``from_pretrained`` loads offline, with its processor's settings."""
    tokenizer = tiny_model.train_tokenizer(word_problems.texts(word_problems.problems(100, seed=0)))
    texts = {name: token.text for name, token in pretrained.FAMILIES[family].items()}
    tokenizer._set_model_specific_special_tokens(texts)
    marks = [*texts.values()]
    marks += [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)] * (family == "smolvlm")
    tokenizer.add_special_tokens({"extra_special_tokens": marks}, replace_extra_special_tokens=False)
    tokenizer.chat_template = _TEMPLATE.replace("MARK", _IN_TEMPLATE[family])
    assert tokenizer.convert_tokens_to_ids(marks[0]) == IMAGE_TOKEN
    config, processor = _vision_config(family, dict(zip(marks, tokenizer.convert_tokens_to_ids(marks), strict=True)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in made.parameters():
            if parameter.dim() > 1 and not parameter.any():  # Gemma's projection: what an image holds would not matter
                torch.nn.init.normal_(parameter, std=0.02)
    made.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def _vision_config(family: str, ids: dict[str, int]) -> tuple[Any, dict[str, Any]]:
    special = tiny_model.special_token_ids()
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128}
    text = {**layers, "num_key_value_heads": 2, "vocab_size": tiny_model.VOCABULARY_SIZE, **special}
    text |= {"max_position_embeddings": tiny_model.CONTEXT_LENGTH, "tie_word_embeddings": True}
    tower = {**layers, "image_size": 56, "patch_size": 14}
    if family == "qwen2_5_vl":
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
        vision = {"depth": 2, "hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 128, "num_heads": 4}
        config = transformers.Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": rope},
            vision_config={**vision, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
            tie_word_embeddings=True,
            **special,
        )
        pixels = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
        return config, {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, **pixels}
    if family == "gemma3":
        config = transformers.Gemma3Config(
            text_config={**text, **_SLIDING, "query_pre_attn_scalar": 16},
            vision_config=tower,
            mm_tokens_per_image=4,
            image_token_index=ids["<image_soft_token>"],
            boi_token_index=ids["<start_of_image>"],
            eoi_token_index=ids["<end_of_image>"],
            **special,
        )
        size = {"height": 56, "width": 56}
        return config, {"image_processor_type": "Gemma3ImageProcessor", "size": size, "image_seq_length": 4}
    if family == "llava":
        config = transformers.LlavaConfig(
            text_config={**text, "model_type": "llama"},
            vision_config={**tower, "model_type": "clip_vision_model"},
            image_token_index=ids["<image>"],
            **special,
        )
        edge = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
        return config, {"image_processor_type": "CLIPImageProcessor", **edge}
    config = transformers.SmolVLMConfig(
        text_config={**text, "model_type": "llama"},
        vision_config={**tower, "image_size": 64, "patch_size": 16},
        scale_factor=2,
        image_token_id=ids["<image>"],
        tie_word_embeddings=True,
        **special,
    )
    sizes = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}
    return config, {"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": True, **sizes}
