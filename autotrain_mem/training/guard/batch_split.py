"""Cuts a prepared micro-batch into parts by its rows, and puts together what an evaluation says of the parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from autotrain_mem.methods.interface import Basis
from autotrain_mem.training.guard.image_split import RowsImages, has_images, images_of_rows, is_of_images


class Layout(StrEnum):
    """The first dimension of a batch counts one of these."""

    ROWS = "rows"
    PAIRS = "pairs"
    """All chosen rows, then all rejected ones in the same order; a pair's two rows stay together."""


_IDS = ("input_ids", "prompt_ids", "completion_ids", "chosen_input_ids", "rejected_input_ids")
"""What the trainers' batches call the tokens that a model reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A micro-batch or a part of one, on its device."""

    inputs: Mapping[str, Any]
    layout: Layout
    image_token: int | None = None
    """See ``image_split.image_token_of``."""

    @property
    def rows(self) -> int:
        """Size of the first dimension: two for each pair."""
        return int(self._ids[0].shape[0]) if self._ids else 1

    @property
    def units(self) -> int:
        """The most parts that it can be cut into: 1 where images cannot be told apart."""
        return 1 if self.why_not else self.members

    @property
    def members(self) -> int:
        """Rows or pairs: 1 where they cannot be told apart: several sequences in one row (packing, padding-free)."""
        lengths = (None, self.rows, self.rows // 2) if self.layout is Layout.PAIRS else (None, self.rows)
        by_rows = (value for name, value in self.inputs.items() if not is_of_images(name))
        if not self._ids or any(_length(value) not in lengths for value in by_rows):
            return 1
        return self.rows // 2 if self.layout is Layout.PAIRS else self.rows

    @property
    def why_not(self) -> str | None:
        """Returns why it cannot be cut though it has several rows: what is not certain of its images."""
        images = self._images()
        return images if isinstance(images, str) and self.members > 1 else None

    def _images(self) -> RowsImages | str | None:
        return images_of_rows(self.inputs, self.image_token) if has_images(self.inputs) else None

    @property
    def tokens(self) -> int:
        """Returns the number of tokens, with padding."""
        return sum(ids.numel() for ids in self._ids)

    @property
    def _ids(self) -> list[Any]:
        return [self.inputs[name] for name in _IDS if name in self.inputs]

    def cut(self, count: int, *, trim: bool = True) -> list[Piece]:
        """Cuts it into parts of as equal a size as possible.

        Args:
            trim: Leave out the columns in which a part has nothing but padding.
        """
        images = self._images()
        assert not isinstance(images, str), images
        parts = []
        for units in split_evenly(range(self.members), count):
            half = self.rows // 2  # of pairs: the chosen ones, then the rejected ones
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
    """Slices the rows of a value that has all of them, or those of the first span where it has one for each pair."""
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
    """Length of the first dimension; None for what belongs to the batch as a whole."""
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.dim() else None
    return len(value) if isinstance(value, (list, tuple)) else None


def _without_padding(inputs: dict[str, Any]) -> dict[str, Any]:
    """Drops the columns on the right that no row of a part attends to; the others cannot see them.

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
    """Returns how many rows, pairs or tokens a mean is over."""
    if basis is Basis.WHOLE:
        return 1.0
    if basis is Basis.UNITS:
        return float(piece.members)
    mask = counted_tokens(piece.inputs)
    if basis is Basis.CHOSEN_TOKENS:
        mask = mask[: len(mask) // 2]
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
