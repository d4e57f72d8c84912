"""Models with random weights, written to disk once, so that the trainer's own ``from_pretrained`` loads them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

TIED = {"tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Qwen/Qwen2.5-0.5B's config.json
    "qwen2-0.5b": (
        "Qwen2Config",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "vocab_size": 151936,
            **TIED,
        },
    ),
    # meta-llama/Llama-3.2-1B's config.json
    "llama-1b": (
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "vocab_size": 128256,
            **TIED,
        },
    ),
    # For a dry run on a CPU.
    "tiny": (
        "Qwen2Config",
        {
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "vocab_size": 2048,
            **TIED,
        },
    ),
}
CONFIGS = ("config.json", "generation_config.json")
"""What a rehearsal reads of a model."""
WEIGHTS_SCALE = 0.02
BLOCK_ELEMENTS = 1 << 20
"""Random numbers are drawn once and repeated: what matters is that they are finite, and a billion of them take a minute
on one core."""


def model_folder(root: Path, name: str) -> Path:
    """The model's folder; written now if it is not there."""
    folder = root / name
    if not (folder / CONFIGS[0]).is_file():
        _write(folder, name)
    return folder


def config_files(folder: Path) -> dict[str, str]:
    """The texts of ``CONFIGS``, for a record: with them the same model can be rehearsed without its weights."""
    return {name: (folder / name).read_text(encoding="utf-8") for name in CONFIGS if (folder / name).is_file()}


def _write(folder: Path, name: str) -> None:
    from autotrain_mem.cli import tiny_model, word_problems

    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True, exist_ok=True)
    try:
        tiny_model.train_tokenizer(word_problems.texts(word_problems.problems(100, seed=0))).save_pretrained(unfinished)
        _random_model(name).save_pretrained(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _random_model(name: str) -> Any:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    from autotrain_mem.cli.tiny_model import special_token_ids

    kind, sizes = MODELS[name]
    config = getattr(transformers, kind)(**sizes, **special_token_ids())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu").tie_weights()
    block = torch.randn(BLOCK_ELEMENTS, generator=torch.Generator().manual_seed(0)).mul_(WEIGHTS_SCALE).bfloat16()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if path.endswith("bias") else 1.0)
                continue
            for piece in parameter.view(-1).split(BLOCK_ELEMENTS):
                piece.copy_(block[: len(piece)])
    return model
