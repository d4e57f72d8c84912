"""Tells which entries of a batch's image tensors are of which of its rows, where that is certain.

A row's share is told by its image tokens, of which a model's forward wants exactly as many as its images have features
(``transformers/models/*/modeling_*.py: get_placeholder_mask``), and by the numbers that TRL keeps beside them.
It answers runs that end half way since images differ in size (QwenLM/Qwen3-VL#1573). Images of which a model is told
the sizes beside (LLaVA-NeXT, Pixtral) are not told apart.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_OF_IMAGES = re.compile("pixel|image|video|audio|patch|tile|spatial|grid|aspect|crop|vision")
"""Names of what processors make of images; of tokens they make ``..._ids`` and masks."""
COUNTS = ("num_images", "batch_num_images")
"""Images of each row (``trl/trainer/grpo_trainer.py: _generate_and_score_completions``;
``transformers/models/llava_onevision/image_processing_llava_onevision.py``)."""
_KNOWN = {"pixel_values", "image_grid_thw", "pixel_attention_mask", *COUNTS}

_NO_TOKENS = "the images of each row are not known: the model's configuration names no image token"
_MISMATCH = "the images of each row are not known: image tokens and images do not match"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsImages:
    """Holds which entries each row has in tensors that are laid out by patch, tile or image."""

    entries: Mapping[str, Sequence[int]]
    """For each such tensor how many entries of its first dimension are of each row, in their order."""
    has_images: Sequence[bool]

    def of_part(self, inputs: Mapping[str, Any], rows: Sequence[range]) -> dict[str, Any]:
        """Returns the inputs that are not by row, and none where these rows have no image at all.

        A model takes no empty tensors, and TRL makes none (``trl/trainer/sft_trainer.py:
        DataCollatorForVisionLanguageModeling``).
        """
        if not any(any(self.has_images[span.start : span.stop]) for span in rows):
            return dict.fromkeys(name for name in inputs if is_of_images(name) and name not in COUNTS)
        taken = {}
        for name, entries in self.entries.items():
            ends = [0, *itertools.accumulate(entries)]
            assert ends[-1] == len(inputs[name]), "as many as all rows have"
            parts = [inputs[name][ends[span.start] : ends[span.stop]] for span in rows]
            taken[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
        return taken


def is_of_images(name: str) -> bool:
    """Returns whether an input of this name is made of images."""
    return _OF_IMAGES.search(name) is not None


def has_images(inputs: Mapping[str, Any]) -> bool:
    """Returns whether a batch has images at all."""
    return any(is_of_images(name) and name not in COUNTS and value is not None for name, value in inputs.items())


def image_token_of(model: Any) -> int | None:
    """Returns the id of the tokens in whose places a model puts features of images."""
    config = getattr(model, "config", None)
    for name in ("image_token_id", "image_token_index"):  # older configurations: the second
        token = getattr(config, name, None)
        if isinstance(token, int):
            return token
    return None


def images_of_rows(inputs: Mapping[str, Any], image_token: int | None) -> RowsImages | str:
    """Returns which images are of which rows, or why that is not certain.

    Args:
        inputs: Of a forward: tokens by row, and what was made of images.
        image_token: See :func:`image_token_of`.
    """
    names = {name for name in inputs if is_of_images(name) and inputs[name] is not None}
    if unknown := names - _KNOWN:
        return f"which images are of which rows is not known where a batch has {', '.join(sorted(unknown))}"
    ids = [inputs[name] for name in ("input_ids", "prompt_ids", "completion_ids") if inputs.get(name) is not None]
    if image_token is None or not ids:
        return _NO_TOKENS
    if not isinstance(inputs.get("pixel_values"), torch.Tensor):
        return _MISMATCH
    is_image = torch.cat(ids, dim=1) == image_token
    batch = _Batch(pixels=inputs["pixel_values"], tokens=is_image.sum(dim=1).tolist())
    counts = next((list(map(int, inputs[name])) for name in COUNTS if inputs.get(name) is not None), None)
    if counts is not None and len(counts) != len(batch.tokens):
        return _MISMATCH
    if "image_grid_thw" in names:
        found = _by_patches(batch, inputs["image_grid_thw"], counts)
    elif batch.pixels.dim() == 5:
        found = _by_tiles_of_rows(batch, inputs.get("pixel_attention_mask"))
    elif batch.pixels.dim() == 4 and "pixel_attention_mask" not in names:
        found = _by_equal_entries(batch, counts)
    else:
        return f"which images are of which rows is not known where pixel_values have {batch.pixels.dim()} dimensions"
    return found or _MISMATCH


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    pixels: torch.Tensor
    tokens: list[int]
    """Image tokens of each row."""

    def tokens_each(self, number: int) -> int | None:
        """Image tokens for each of so many equal things; None where they are not whole."""
        each, rest = divmod(sum(self.tokens), number) if number else (0, sum(self.tokens))
        return None if rest or (number and not each) else each

    def shared(self, entries: Mapping[str, Sequence[int]]) -> RowsImages:
        return RowsImages(entries=entries, has_images=[tokens > 0 for tokens in self.tokens])


def _by_patches(batch: _Batch, grids: Any, counts: list[int] | None) -> RowsImages | None:
    """Qwen-VL's: patches of all images one after the other; some square of patches makes a token.

    A row has the images that come next, until their patches make up its tokens.
    """
    patches = grids.prod(dim=-1).tolist()
    each = sum(patches) // max(1, sum(batch.tokens))
    if sum(patches) != len(batch.pixels) or sum(patches) != each * sum(batch.tokens):
        return None
    images, entries, start = [], [], 0
    for tokens in batch.tokens:
        end = start
        while end < len(patches) and sum(patches[start:end]) < each * tokens:
            end += 1
        images.append(end - start)
        entries.append(sum(patches[start:end]))
        start = end
    matches = entries == [each * tokens for tokens in batch.tokens] and sum(images) == len(patches)
    if not matches or counts not in (None, images):
        return None
    return batch.shared({"pixel_values": entries, "image_grid_thw": images})


def _by_tiles_of_rows(batch: _Batch, mask: Any) -> RowsImages | None:
    """Idefics' and SmolVLM's: a place for each row, filled up with tiles of zeros, which their models leave out
    (``transformers/models/smolvlm/modeling_smolvlm.py: get_image_features``). All tiles make as many tokens."""
    if len(batch.pixels) != len(batch.tokens) or (mask is not None and mask.shape[:2] != batch.pixels.shape[:2]):
        return None
    tiles = ((batch.pixels if mask is None else mask) != 0).flatten(2).any(dim=2).sum(dim=1).tolist()
    each = batch.tokens_each(sum(tiles))
    if each is None or batch.tokens != [each * number for number in tiles]:
        return None
    names = ["pixel_values"] if mask is None else ["pixel_values", "pixel_attention_mask"]
    return batch.shared({name: [1] * len(tiles) for name in names})


def _by_equal_entries(batch: _Batch, counts: list[int] | None) -> RowsImages | None:
    """Splits as for Gemma, LLaVA and InternVL: images or tiles have one shape, so that each makes as many tokens."""
    each = batch.tokens_each(len(batch.pixels))
    if each is None or any(tokens % max(1, each) for tokens in batch.tokens):
        return None
    entries = [tokens // max(1, each) for tokens in batch.tokens]
    if counts is not None and counts != entries and sum(counts) == len(batch.pixels):
        return None
    return batch.shared({"pixel_values": entries})
