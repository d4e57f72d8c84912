"""The compared cases: every trainer, every kind of weights, checkpointing on and off, both allocator modes."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpu_records.cases import GpuCase, make

from autotrain_mem.types.methods_table import METHODS
from hollow_cuda.models import SMALL

LENGTH, PROMPT, SMALL_LENGTH = 1024, 256, 512


def cases() -> list[GpuCase]:
    """Returns all combinations, then the small cases, then those with images."""
    return [*_product(), *small_cases(), *_pictured()]


def _product() -> Iterator[GpuCase]:
    weights = ("full", "lora", "4bit", "8bit")
    for method, kind, checkpointing, expandable in itertools.product(METHODS, weights, (True, False), (False, True)):
        length = PROMPT if METHODS[method].is_online else LENGTH
        yield _make(method, kind, length, checkpointing, expandable_segments=expandable)


def _pictured() -> Iterator[GpuCase]:
    """Yields cases whose rows have two images of different sizes. Of the three models, one makes tokens in proportion
    to the pixels, one makes equally many for each image, and one cuts images into tiles."""
    chosen = (
        ("sft", "full", "qwen2-vl-small", True),
        ("sft", "lora", "gemma3-vl-small", False),
        ("sft", "lora", "smolvlm-small", True),
        ("dpo", "lora", "qwen2-vl-small", True),
        ("dpo", "full", "smolvlm-small", True),
        ("grpo", "lora", "gemma3-vl-small", True),
    )
    for method, weights, model, checkpointing in chosen:
        length = SMALL_LENGTH if METHODS[method].is_online else LENGTH
        case = _make(method, weights, length, checkpointing, expandable_segments=weights == "full")
        yield replace(case, name=f"images-{case.name}-{model}", model=model, images=("448x336", "280x420"))


def small_cases() -> list[GpuCase]:
    """Returns cases whose measured peaks are stored for a test without the CUDA build; each rehearses in seconds."""
    made = [
        _make("sft", "lora", SMALL_LENGTH, True),
        _make("sft", "4bit", SMALL_LENGTH, False, expandable_segments=True),
        _make("sft", "full", SMALL_LENGTH, False),
        _make("dpo", "lora", SMALL_LENGTH, True, expandable_segments=True),
        _make("reward", "full", SMALL_LENGTH, True),
        _make("grpo", "lora", PROMPT, True, expandable_segments=True),
        _make("kto", "lora", SMALL_LENGTH, True),
    ]
    return [replace(case, name=f"small-{case.name}", model=SMALL) for case in made]


def _make(method: str, weights: str, length: int, checkpointing: bool, **knobs: Any) -> GpuCase:
    if weights == "8bit":
        return make(method, "lora", length, checkpointing, also="8bit", load_in_8bit=True, **knobs)
    return make(method, weights, length, checkpointing, **knobs)
