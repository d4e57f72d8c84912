"""Finds which entries of a batch's image tensors belong to which of its rows, if that is certain.

A row's share follows from its image tokens, of which a model's forward needs exactly as many as its images have
features (``transformers/models/*/modeling_*.py: get_placeholder_mask``), and from TRL's counts of images. Without it
runs end half way if images differ in size (QwenLM/Qwen3-VL#1573). Images with separate sizes (LLaVA-NeXT, Pixtral) are
not supported.
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
    pixels, mask = inputs["pixel_values"], inputs.get("pixel_attention_mask")
    tokens = (torch.cat(ids, dim=1) == image_token).sum(dim=1).tolist()
    counts = next((list(map(int, inputs[name])) for name in COUNTS if inputs.get(name) is not None), None)
    if counts is not None and len(counts) != len(tokens):
        return _MISMATCH
    if "image_grid_thw" in names:
        entries = _by_patches(pixels, tokens, inputs["image_grid_thw"], counts)
    elif pixels.dim() == 5:
        entries = _by_tiles_of_rows(pixels, tokens, mask)
    elif pixels.dim() == 4 and mask is None:
        entries = _by_equal_entries(pixels, tokens, counts)
    else:
        return f"which images are of which rows is not known where pixel_values have {pixels.dim()} dimensions"
    return _MISMATCH if entries is None else RowsImages(entries=entries, has_images=[each > 0 for each in tokens])


Entries = dict[str, list[int]]
"""As in :class:`RowsImages`."""


def _by_patches(pixels: torch.Tensor, tokens: list[int], grids: Any, counts: list[int] | None) -> Entries | None:
    """Qwen-VL's: patches of all images one after the other; some square of patches makes a token.

    A row has the images that come next, until their patches make up its tokens.
    """
    patches = grids.prod(dim=-1).tolist()
    each = sum(patches) // max(1, sum(tokens))
    if sum(patches) != len(pixels) or sum(patches) != each * sum(tokens):
        return None
    images, entries, start = [], [], 0
    for number in tokens:
        end = start
        while end < len(patches) and sum(patches[start:end]) < each * number:
            end += 1
        images.append(end - start)
        entries.append(sum(patches[start:end]))
        start = end
    matches = entries == [each * number for number in tokens] and sum(images) == len(patches)
    if not matches or counts not in (None, images):
        return None
    return {"pixel_values": entries, "image_grid_thw": images}


def _by_tiles_of_rows(pixels: torch.Tensor, tokens: list[int], mask: Any) -> Entries | None:
    """Idefics' and SmolVLM's: a place for each row, filled up with tiles of zeros, which their models leave out
    (``transformers/models/smolvlm/modeling_smolvlm.py: get_image_features``). All tiles make as many tokens."""
    if len(pixels) != len(tokens) or (mask is not None and mask.shape[:2] != pixels.shape[:2]):
        return None
    tiles = ((pixels if mask is None else mask) != 0).flatten(2).any(dim=2).sum(dim=1).tolist()
    each = _tokens_each(tokens, sum(tiles))
    if each is None or tokens != [each * number for number in tiles]:
        return None
    names = ["pixel_values"] if mask is None else ["pixel_values", "pixel_attention_mask"]
    return {name: [1] * len(tiles) for name in names}


def _by_equal_entries(pixels: torch.Tensor, tokens: list[int], counts: list[int] | None) -> Entries | None:
    """Gemma's, LLaVA's and InternVL's: images or tiles of one shape, each of which makes as many tokens."""
    each = _tokens_each(tokens, len(pixels))
    if each is None or any(number % max(1, each) for number in tokens):
        return None
    entries = [number // max(1, each) for number in tokens]
    if counts is not None and counts != entries and sum(counts) == len(pixels):
        return None
    return {"pixel_values": entries}


def _tokens_each(tokens: list[int], number: int) -> int | None:
    """Returns the image tokens for each of so many equal things; None if they are not whole."""
    each, rest = divmod(sum(tokens), number) if number else (0, sum(tokens))
    return None if rest or (number and not each) else each
