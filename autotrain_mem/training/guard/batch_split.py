"""Cuts a prepared micro-batch into parts by its rows, and joins what an evaluation returns for the parts.

A batch with images is not cut: processors lay images out by patch, tile or image, and cutting them by rows fails midway
through a run (QwenLM/Qwen3-VL#1573).
"""

from __future__ import annotations

import re
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
_OF_IMAGES = re.compile("pixel|image|video|audio|patch|tile|spatial|grid|aspect|crop|vision")
"""Matches the names of a processor's image outputs; its token outputs are called ``..._ids`` and masks."""
_COUNTS = ("num_images", "batch_num_images")
"""The number of images in each row (``trl/trainer/grpo_trainer.py: _generate_and_score_completions``;
``transformers/models/llava_onevision/image_processing_llava_onevision.py``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A micro-batch or a part of one, on its device."""

    inputs: Mapping[str, Any]
    layout: Layout

    @property
    def rows(self) -> int:
        """Size of the first dimension: two rows for each pair."""
        return int(self._ids[0].shape[0]) if self._ids else 1

    @property
    def units(self) -> int:
        """The most parts that it can be cut into."""
        return 1 if self.why_not else self.members

    @property
    def members(self) -> int:
        """The number of rows or pairs; 1 if several sequences share a row (packing, padding-free)."""
        lengths = (None, self.rows, self.rows // 2) if self.layout is Layout.PAIRS else (None, self.rows)
        by_rows = (value for name, value in self.inputs.items() if not _OF_IMAGES.search(name))
        if not self._ids or any(_length(value) not in lengths for value in by_rows):
            return 1
        return self.rows // 2 if self.layout is Layout.PAIRS else self.rows

    @property
    def why_not(self) -> str | None:
        """Returns why several rows cannot be cut; None if they can."""
        images = (name for name in self.inputs if _OF_IMAGES.search(name) and name not in _COUNTS)
        has_images = any(self.inputs[name] is not None for name in images)
        return "rows with images are not cut" if has_images and self.members > 1 else None

    @property
    def tokens(self) -> int:
        """The number of tokens, with padding."""
        return sum(ids.numel() for ids in self._ids)

    @property
    def _ids(self) -> list[Any]:
        return [self.inputs[name] for name in _IDS if name in self.inputs]

    def cut(self, count: int, *, trim: bool = True) -> list[Piece]:
        """Cuts it into parts of sizes as equal as possible.

        Args:
            trim: Whether to drop the columns that are all padding in a part.
        """
        parts = []
        for units in split_evenly(range(self.members), count):
            half = self.rows // 2  # for pairs: chosen rows, then rejected rows
            spans = [units] if self.layout is Layout.ROWS else [units, range(half + units.start, half + units.stop)]
            inputs = {name: _of_rows(value, spans, self.rows) for name, value in self.inputs.items()}
            parts.append(Piece(inputs=_without_padding(inputs) if trim else inputs, layout=self.layout))
        return parts

    def sizes(self, count: int) -> str:
        """Returns the sizes of the parts that :meth:`cut` makes: ``3 + 2``."""
        return " + ".join(str(len(part)) for part in split_evenly(range(self.members), count))


def _of_rows(value: Any, spans: Sequence[range], rows: int) -> Any:
    """Slices the rows of a value; a value with one entry for each pair is sliced by the first span only."""
    size = _length(value)
    if size is None:
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
    """Returns the length of the first dimension; None for a value of the batch as a whole."""
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.dim() else None
    return len(value) if isinstance(value, (list, tuple)) else None


def _without_padding(inputs: dict[str, Any]) -> dict[str, Any]:
    """Drops the columns on the right that no row of a part attends to.

    Completions (GRPO, RLOO) keep theirs: the values computed earlier for them have the same width. The result is
    contiguous, like a collator's tensors: some models call ``labels.view``.
    """
    mask = inputs.get("attention_mask")
    if mask is None or mask.dim() != 2 or "input_ids" not in inputs:
        return inputs
    attended = mask.any(dim=0).nonzero()
    width = int(attended[-1]) + 1 if len(attended) else mask.shape[1]
    return {
        name: value[:, :width].contiguous()
        if isinstance(value, torch.Tensor) and value.shape[:2] == mask.shape
        else value
        for name, value in inputs.items()
    }


def count(piece: Piece, basis: Basis) -> float:
    """Returns the number of rows, pairs or tokens that a mean is taken over."""
    if basis is Basis.WHOLE:
        return 1.0
    if basis is Basis.UNITS:
        return float(piece.members)
    mask = counted_tokens(piece.inputs)
    if basis is Basis.CHOSEN_TOKENS:
        mask = mask[: len(mask) // 2]
    return float(mask.sum())


def counted_tokens(inputs: Mapping[str, Any]) -> Any:
    """Returns 1 for each token that counts in the loss. Causal models shift labels by one, and DPO its mask."""
    if "completion_ids" in inputs:  # GRPO, RLOO: the policy does not generate tool tokens
        mask = inputs["completion_mask"]
        return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
    if "completion_mask" in inputs:
        return inputs["completion_mask"][:, 1:]
    if "shift_labels" in inputs:
        return inputs["shift_labels"] != -100
    return inputs["labels"][..., 1:] != -100


def joined(values: Sequence[Any], layout: Layout) -> Any:
    """Joins the parts' predictions or labels into those of the whole. Raises TypeError for a value without rows."""
    first = values[0]
    if first is None:
        return None
    if isinstance(first, Mapping):
        return {name: joined([value[name] for value in values], layout) for name in first}
    if isinstance(first, (list, tuple)):
        return type(first)(joined(entries, layout) for entries in zip(*values, strict=True))
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        raise TypeError("A prediction that has no rows cannot be put together from parts.")
    if layout is Layout.PAIRS:
        values = [value[: len(value) // 2] for value in values] + [value[len(value) // 2 :] for value in values]
    return torch.cat(list(values))
