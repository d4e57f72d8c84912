"""Cuts a prepared micro-batch into parts by its rows, and joins what an evaluation returns for the parts.

Images are cut only if it is certain to which row each belongs (:func:`images_of_rows`).
"""

import itertools
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from autotrain_mem.methods.interface import Basis


class Layout(StrEnum):
    """Names the unit along the first dimension of a batch."""

    ROWS = "rows"
    PAIRS = "pairs"
    """All chosen rows, then all rejected rows in the same order; the two rows of a pair stay together."""


_IDS = ("input_ids", "prompt_ids", "completion_ids", "chosen_input_ids", "rejected_input_ids")
"""The names of token ids in the trainers' batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A micro-batch or a part of one, on its device."""

    inputs: Mapping[str, Any]
    layout: Layout
    image_token: int | None = None
    """See :func:`image_token_of`."""

    @property
    def rows(self) -> int:
        """Size of the first dimension: two rows for each pair."""
        return int(self._ids[0].shape[0]) if self._ids else 1

    @property
    def units(self) -> int:
        """The most parts that it can be cut into; 1 if it is unknown which images belong to which row."""
        return 1 if self.why_not else self.members

    @property
    def members(self) -> int:
        """The number of rows or pairs; 1 if several sequences share a row (packing, padding-free)."""
        lengths = (None, self.rows, self.rows // 2) if self.layout is Layout.PAIRS else (None, self.rows)
        by_rows = (value for name, value in self.inputs.items() if not is_of_images(name))
        if not self._ids or any(_length(value) not in lengths for value in by_rows):
            return 1
        return self.rows // 2 if self.layout is Layout.PAIRS else self.rows

    @property
    def why_not(self) -> str | None:
        """Returns why images prevent cutting a batch of several rows; None if they do not."""
        return images if isinstance(images := self._images(), str) and self.members > 1 else None

    def _images(self) -> "RowsImages | str | None":
        return images_of_rows(self.inputs, self.image_token) if has_images(self.inputs) else None

    @property
    def tokens(self) -> int:
        """The number of tokens, with padding."""
        return sum(ids.numel() for ids in self._ids)

    @property
    def _ids(self) -> list[Any]:
        return [self.inputs[name] for name in _IDS if name in self.inputs]

    def cut(self, count: int, *, trim: bool = True) -> "list[Piece]":
        """Cuts it into parts of sizes as equal as possible. ``trim``: whether to drop the columns that are all
        padding in a part."""
        images = self._images()
        assert not isinstance(images, str), images
        parts = []
        for units in split_evenly(range(self.members), count):
            half = self.rows // 2  # for pairs: chosen rows, then rejected rows
            spans = [units] if self.layout is Layout.ROWS else [units, range(half + units.start, half + units.stop)]
            of_images = {} if images is None else images.of_part(self.inputs, spans)
            inputs = {
                name: _of_rows(value, spans, self.rows) for name, value in self.inputs.items() if name not in of_images
            }
            inputs = _without_padding(inputs) if trim else inputs
            inputs |= {name: value for name, value in of_images.items() if value is not None}
            parts.append(Piece(inputs=inputs, layout=self.layout, image_token=self.image_token))
        return parts

    def sizes(self, count: int) -> str:
        """Returns the sizes of the parts that :meth:`cut` makes: ``3 + 2``."""
        return " + ".join(str(len(part)) for part in split_evenly(range(self.members), count))


def _of_rows(value: Any, spans: Sequence[range], rows: int) -> Any:
    """Slices the rows of a value; a value with one entry for each pair is sliced by the first span only."""
    if (size := _length(value)) is None:
        return value
    parts = [value[span.start : span.stop] for span in (spans if size == rows else spans[:1])]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if isinstance(value, torch.Tensor) else [each for part in parts for each in part]


def split_evenly(rows: range, parts: int) -> Iterator[range]:
    """Cuts rows into parts, the larger ones first: 5 rows in 2 parts are 3 + 2."""
    size, longer = divmod(len(rows), parts)
    start = rows.start
    for number in range(parts):
        stop = start + size + (number < longer)
        yield range(start, stop)
        start = stop


def _length(value: Any) -> int | None:
    """Returns the length of the first dimension; None for a value without rows."""
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.dim() else None
    return len(value) if isinstance(value, (list, tuple)) else None


def _without_padding(inputs: dict[str, Any]) -> dict[str, Any]:
    """Drops the columns on the right that no row of a part attends to."""
    mask = inputs.get("attention_mask")
    # GRPO's and RLOO's completions keep their padding: values computed earlier for them have the same width.
    if mask is None or mask.dim() != 2 or "input_ids" not in inputs:
        return inputs
    attended = mask.any(dim=0).nonzero()
    width = int(attended[-1]) + 1 if len(attended) else mask.shape[1]
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    padded = {name: value for name, value in tensors.items() if value.shape[:2] == mask.shape}
    # Contiguous, like a collator's tensors: some models call ``labels.view``.
    return inputs | {name: value[:, :width].contiguous() for name, value in padded.items()}


def count(piece: Piece, basis: Basis) -> float:
    """Returns the number of rows, pairs or tokens that a mean is taken over."""
    if basis is Basis.WHOLE:
        return 1.0
    if basis is Basis.UNITS:
        return float(piece.members)
    every = counted_tokens(piece.inputs)
    mask = every[: len(every) // 2] if basis is Basis.CHOSEN_TOKENS else every
    return float(mask.sum())


def counted_tokens(inputs: Mapping[str, Any]) -> Any:
    """Returns a mask of the tokens that count in the loss. Causal models shift labels by one; DPO shifts its mask."""
    if "completion_ids" in inputs:  # GRPO, RLOO: the policy does not generate tool tokens
        mask = inputs["completion_mask"]
        return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
    if "completion_mask" in inputs:
        return inputs["completion_mask"][:, 1:]
    if "shift_labels" in inputs:
        return inputs["shift_labels"] != -100
    return inputs["labels"][..., 1:] != -100


def joined(values: Sequence[Any], layout: Layout, weights: Sequence[float]) -> Any:
    """Joins the parts' predictions or labels into those of the whole. ``weights``: each part's, in a sum of tensors
    without rows. Raises TypeError for other values."""
    if (first := values[0]) is None:
        return None
    if isinstance(first, Mapping):
        return {name: joined([value[name] for value in values], layout, weights) for name in first}
    if isinstance(first, (list, tuple)):
        return type(first)(joined(entries, layout, weights) for entries in zip(*values, strict=True))
    if not isinstance(first, torch.Tensor):
        raise TypeError(f"A prediction of type {type(first).__name__} cannot be joined from parts.")
    if first.dim() == 0:
        return sum(value * weight for value, weight in zip(values, weights, strict=True))
    if layout is Layout.PAIRS:
        values = [value[: len(value) // 2] for value in values] + [value[len(value) // 2 :] for value in values]
    return torch.cat(list(values))


_OF_IMAGES = re.compile("pixel|image|video|audio|patch|tile|spatial|grid|aspect|crop|vision")
"""Matches the names of a processor's image outputs, and not of others such as ``input_ids`` and ``attention_mask``."""
COUNTS = ("num_images", "batch_num_images")
"""The number of images in each row (``trl/trainer/grpo_trainer.py: _generate_and_score_completions``;
``transformers/models/llava_onevision/image_processing_llava_onevision.py``)."""
_KNOWN = {"pixel_values", "image_grid_thw", "pixel_attention_mask", *COUNTS}

_MISMATCH = "images cannot be assigned to rows: image tokens and images do not match"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsImages:
    """Maps rows to entries of the tensors that are laid out by patch, tile or image."""

    entries: Mapping[str, Sequence[int]]
    """For each such tensor, the number of entries of its first dimension that belong to each row, in row order."""
    has_images: Sequence[bool]

    def of_part(self, inputs: Mapping[str, Any], rows: Sequence[range]) -> dict[str, Any]:
        """Returns the part's inputs that are not laid out by row; None for each if these rows have no image at all.

        Models reject empty tensors, and TRL makes none (``trl/trainer/sft_trainer.py:
        DataCollatorForVisionLanguageModeling``).
        """
        if not any(any(self.has_images[span.start : span.stop]) for span in rows):
            return dict.fromkeys(name for name in inputs if is_of_images(name) and name not in COUNTS)
        taken = {}
        for name, entries in self.entries.items():
            ends = [0, *itertools.accumulate(entries)]
            assert ends[-1] == len(inputs[name]), "every entry belongs to a row"
            parts = [inputs[name][ends[span.start] : ends[span.stop]] for span in rows]
            taken[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
        return taken


def is_of_images(name: str) -> bool:
    """Returns whether an input with this name is made from images."""
    return _OF_IMAGES.search(name) is not None


def has_images(inputs: Mapping[str, Any]) -> bool:
    """Returns whether a batch has any images."""
    return any(is_of_images(name) and name not in COUNTS and value is not None for name, value in inputs.items())


def image_token_of(model: Any) -> int | None:
    """Returns the id of the tokens that a model replaces with image features."""
    config = getattr(model, "config", None)
    for name in ("image_token_id", "image_token_index"):  # the second in older configurations
        if isinstance(token := getattr(config, name, None), int):
            return token
    return None


def images_of_rows(inputs: Mapping[str, Any], image_token: int | None) -> RowsImages | str:
    """Returns which images belong to which rows, or why that is not certain.

    A row's images follow from TRL's image counts and from the row's image tokens: a model's forward needs exactly one
    token for each feature of the images (``transformers/models/*/modeling_*.py: get_placeholder_mask``). Cutting images
    of different sizes without this check fails midway through a run (QwenLM/Qwen3-VL#1573). Models whose image sizes
    are a separate input (LLaVA-NeXT, Pixtral) are not supported.
    """
    names = {name for name in inputs if is_of_images(name) and inputs[name] is not None}
    if unknown := names - _KNOWN:
        return f"images cannot be assigned to rows if a batch has {', '.join(sorted(unknown))}"
    ids = [inputs[name] for name in ("input_ids", "prompt_ids", "completion_ids") if inputs.get(name) is not None]
    if image_token is None or not ids:
        return "images cannot be assigned to rows: the model's configuration names no image token"
    if not isinstance(inputs.get("pixel_values"), torch.Tensor):
        return _MISMATCH
    pixels, mask = inputs["pixel_values"], inputs.get("pixel_attention_mask")
    tokens = (torch.cat(ids, dim=1) == image_token).sum(dim=1).tolist()
    counts = next((list(map(int, inputs[name])) for name in COUNTS if inputs.get(name) is not None), None)
    if counts is not None and len(counts) != len(tokens):
        return _MISMATCH
    if "image_grid_thw" in names:  # Qwen-VL's layout: all patches in sequence, a fixed number for each image token
        sizes = inputs["image_grid_thw"].prod(dim=-1).tolist()
        rows = _by_tokens(sizes, tokens)
        images = [len(row) for row in rows]
        entries = {"pixel_values": [sum(row) for row in rows], "image_grid_thw": images}
        matches = sum(sizes) == len(pixels) and counts in (None, images)
    elif pixels.dim() == 5:  # Idefics' and SmolVLM's: one entry for each row, whose tiles have equally many tokens
        # Tiles of zeros are padding (``transformers/models/smolvlm/modeling_smolvlm.py: get_image_features``).
        sizes = ((pixels if mask is None else mask) != 0).flatten(2).any(dim=2).sum(dim=1).tolist()
        rows = [[tiles] for tiles in sizes]
        entries = {name: [1] * len(rows) for name in names & {"pixel_values", "pixel_attention_mask"}}
        matches = mask is None or mask.shape[:2] == pixels.shape[:2]
    elif pixels.dim() == 4 and mask is None:  # Gemma's, LLaVA's and InternVL's: equal images or tiles in sequence
        sizes = [1] * len(pixels)
        rows = _by_tokens(sizes, tokens)
        images = [len(row) for row in rows]
        entries = {"pixel_values": images}
        matches = counts in (None, images) or sum(counts or ()) != len(pixels)
    else:
        return f"images cannot be assigned to rows if pixel_values have {pixels.dim()} dimensions"
    if not matches or [size for row in rows for size in row] != sizes or not _are_alike(list(map(sum, rows)), tokens):
        return _MISMATCH
    return RowsImages(entries=entries, has_images=[each > 0 for each in tokens])


def _by_tokens(sizes: list[int], tokens: list[int]) -> list[list[int]]:
    """Gives each row the next sizes, until they account for the row's image tokens."""
    left, rows = deque(sizes), []
    for number in tokens:
        row: list[int] = []
        while left and sum(row) * sum(tokens) < number * sum(sizes):
            row.append(left.popleft())
        rows.append(row)
    return rows


def _are_alike(sizes: list[int], tokens: list[int]) -> bool:
    """Returns whether all rows have the same, whole ratio of image tokens to the size of their images."""
    few, many = sorted((sum(sizes), sum(tokens)))
    if len(sizes) != len(tokens) or (many and not few) or many % max(1, few):
        return False
    return all(size * sum(tokens) == number * sum(sizes) for size, number in zip(sizes, tokens, strict=True))
