"""Writes models with random weights to disk once, so that the trainer's own ``from_pretrained`` loads them."""

import os
import shutil
from pathlib import Path
from typing import Any


def sizes(width: int, inner: int, layers: int, heads: int, key_heads: int, places: int, words: int) -> dict[str, Any]:
    """Returns the config fields that determine memory, with tied embeddings."""
    return {
        **{"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": words},
        **{"num_attention_heads": heads, "num_key_value_heads": key_heads, "max_position_embeddings": places},
        "tie_word_embeddings": True,
    }


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Qwen/Qwen2.5-0.5B's config.json
    "qwen2-0.5b": ("Qwen2Config", sizes(896, 4864, 24, 14, 2, 32768, 151936)),
    # meta-llama/Llama-3.2-1B's config.json
    "llama-1b": ("LlamaConfig", {**sizes(2048, 8192, 16, 32, 8, 131072, 128256), "head_dim": 64}),
    # For a dry run on a CPU.
    "tiny": ("Qwen2Config", sizes(64, 192, 2, 4, 2, 4096, 2048)),
}
CONFIGS = ("config.json", "generation_config.json")
"""The files of a model that a rehearsal reads."""
WEIGHTS_SCALE = 0.02
BLOCK_ELEMENTS = 1 << 20
"""One block of random numbers is drawn and repeated: they only need to be finite, and drawing a billion would take a
minute on one core."""


def model_folder(root: Path, name: str) -> Path:
    """Returns the model's folder; writes the model if it is missing."""
    folder = root / name
    if not (folder / CONFIGS[0]).is_file():
        _write(folder, name)
    return folder


def config_files(folder: Path) -> dict[str, str]:
    """Returns the texts of ``CONFIGS`` for a record, from which the model can be rehearsed without its weights."""
    return {name: (folder / name).read_text(encoding="utf-8") for name in CONFIGS if (folder / name).is_file()}


def _write(folder: Path, name: str) -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    from autotrain_mem.cli import tiny_model, word_problems

    kind, sizes = MODELS[name]
    config = getattr(transformers, kind)(**sizes, **tiny_model.special_token_ids())
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
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True, exist_ok=True)
    try:
        tiny_model.train_tokenizer(word_problems.texts(word_problems.problems(100, seed=0))).save_pretrained(unfinished)
        model.save_pretrained(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
