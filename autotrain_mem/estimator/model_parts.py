"""Tells which part of a model that reads images a block is of: vision tower, projector or language model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from autotrain_mem.allocator.rounding import round_size
from autotrain_mem.types import Block

VISION, PROJECTOR, LANGUAGE, BETWEEN = "vision tower", "projector", "language model", "shared"
PARTS = (VISION, PROJECTOR, LANGUAGE, BETWEEN)
"""In the order in which an image passes them; the last is what no module of theirs made, such as most of what a
backward pass makes for a moment."""

_PROJECTOR = re.compile(r"\b(multi_modal_projector|connector|merger|deepstack_merger_list)\b")
_VISION = re.compile(r"\b(visual|vision_tower|vision_model)\b")
_LANGUAGE = re.compile(r"\b(language_model|text_model|lm_head)\b")
"""Names of the parts in ``transformers/models/*/modeling_*.py``: Qwen-VL's merger lies within its ``visual``."""


def part_of(name: str) -> str:
    """Name the part that a module or a parameter belongs to.

    >>> part_of("model.visual.merger.mlp.0"), part_of("base_model.model.model.language_model.layers.0.mlp")
    ('projector', 'language model')
    """
    for part, pattern in ((PROJECTOR, _PROJECTOR), (VISION, _VISION), (LANGUAGE, _LANGUAGE)):
        if pattern.search(name):
            return part
    return BETWEEN


def parts_of(blocks: Iterable[Block]) -> tuple[tuple[str, int], ...]:
    """Sum the bytes of blocks by part; empty for a model that has no vision tower."""
    sizes: dict[str, int] = defaultdict(int)
    for block in blocks:
        sizes[part_of(block.module)] += round_size(block.size_bytes)
    return tuple((part, sizes[part]) for part in PARTS if sizes[part]) if VISION in sizes else ()
