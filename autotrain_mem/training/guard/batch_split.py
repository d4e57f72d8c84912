"""Cuts a prepared micro-batch into parts by its rows, and puts together what an evaluation says of the parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from autotrain_mem.methods.interface import Basis


class Layout(StrEnum):
    """The first dimension of a batch counts one of these."""

    ROWS = "rows"
    PAIRS = "pairs"
    """All chosen rows, then all rejected ones in the same order; a pair's two rows stay together."""


IMAGES = {
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "image_position_ids", "pixel_values_videos", "video_grid_thw"),
}
"""Laid out by patch, tile or image, not by row (``trl/trainer/grpo_trainer.py:
_get_per_token_logps_and_entropies``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A micro-batch or a part of one, on its device."""

    inputs: Mapping[str, Any]
    layout: Layout

    @property
    def rows(self) -> int:
        """Size of the first dimension: two for each pair."""
        return int(self._ids[0].shape[0]) if self._ids else 1

    @property
    def units(self) -> int:
        """The most parts that it can be cut into: 1 where rows cannot be told apart.

        So it is with images, and where several sequences lie in one row (packing, padding-free).
        """
        if not self._ids or IMAGES & self.inputs.keys():
            return 1
        lengths = (None, self.rows, self.rows // 2) if self.layout is Layout.PAIRS else (None, self.rows)
        if any(_length(value) not in lengths for value in self.inputs.values()):
            return 1
        return self.rows // 2 if self.layout is Layout.PAIRS else self.rows

    @property
    def tokens(self) -> int:
        """All tokens, with padding."""
        return sum(ids.numel() for ids in self._ids)

    @property
    def _ids(self) -> list[Any]:
        return [self.inputs[name] for name in ("input_ids", "prompt_ids", "completion_ids") if name in self.inputs]

    def cut(self, count: int, *, trim: bool = True) -> list[Piece]:
        """Cut it into parts of as equal a size as possible.

        Args:
            trim: Leave out the columns in which a part has nothing but padding.
        """
        parts = []
        for units in split_evenly(range(self.units), count):
            inputs = {name: self._cut_value(value, units) for name, value in self.inputs.items()}
            parts.append(Piece(inputs=_without_padding(inputs) if trim else inputs, layout=self.layout))
        return parts

    def cut_in_words(self, count: int) -> str:
        """Say how :meth:`cut` would cut it: ``split into 3 + 2 rows``."""
        sizes = [str(len(part)) for part in split_evenly(range(self.units), count)]
        return f"split into {' + '.join(sizes)} {self.layout}"

    def _cut_value(self, value: Any, units: range) -> Any:
        size = _length(value)
        if size is None:
            return value
        if self.layout is Layout.ROWS or size != self.rows:
            return value[units.start : units.stop]
        half = self.rows // 2
        chosen, rejected = value[units.start : units.stop], value[half + units.start : half + units.stop]
        return torch.cat([chosen, rejected]) if isinstance(value, torch.Tensor) else [*chosen, *rejected]


def split_evenly(rows: range, parts: int) -> Iterator[range]:
    """Cut rows into parts, the larger ones first: 5 rows in 2 parts are 3 + 2."""
    size, longer = divmod(len(rows), parts)
    start = rows.start
    for number in range(parts):
        stop = start + size + (number < longer)
        yield range(start, stop)
        start = stop


def _length(value: Any) -> int | None:
    """Length of the first dimension; None for what belongs to the batch as a whole."""
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.dim() else None
    return len(value) if isinstance(value, (list, tuple)) else None


def _without_padding(inputs: dict[str, Any]) -> dict[str, Any]:
    """Leave out the columns on the right that no row of a part attends to; the others cannot see them.

    Completions (GRPO, RLOO) keep theirs: what was computed of them before has the same width. What is left lies in one
    piece, as a collator's tensors do: some models call ``labels.view``.
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
    """How many rows, pairs or tokens a mean is over."""
    if basis is Basis.WHOLE:
        return 1.0
    if basis is Basis.LABELS:
        return float((piece.inputs["labels"] != -100).sum())
    if basis not in (Basis.TOKENS, Basis.CHOSEN_TOKENS, Basis.REJECTED_TOKENS):
        return float(piece.units)
    mask = counted_tokens(piece.inputs)
    half = len(mask) // 2
    if basis is Basis.CHOSEN_TOKENS:
        mask = mask[:half]
    elif basis is Basis.REJECTED_TOKENS:
        mask = mask[half:]
    return float(mask.sum())


def counted_tokens(inputs: Mapping[str, Any]) -> Any:
    """1 for each token that counts for the loss. Labels are shifted by one in causal models, and so is DPO's mask."""
    if "completion_ids" in inputs:  # GRPO, RLOO: the tokens of tools are not the policy's
        mask = inputs["completion_mask"]
        return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
    if "completion_mask" in inputs:
        return inputs["completion_mask"][:, 1:]
    if "shift_labels" in inputs:
        return inputs["shift_labels"] != -100
    return inputs["labels"][..., 1:] != -100


def joined(values: Sequence[Any], layout: Layout) -> Any:
    """The predictions or labels of the parts as the whole's would have been.

    Raises:
        TypeError: they hold something that has no rows.
    """
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
