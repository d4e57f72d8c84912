"""Counts tokens of rows with images: an image's size determines the number of its tokens."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autotrain_mem.data.image_sizes import IMAGE_COLUMNS, Size, row_image_sizes
from autotrain_mem.methods.image_rows import Texts
from autotrain_mem.methods.row_lengths import RowLengths
from autotrain_mem.trainers.pretrained import blank
from autotrain_mem.types.data import ImageProfile

OfRow = Callable[[Mapping[str, Any], int, Any], Texts]
"""Formats a row with a given number of images for a processor (``methods.image_rows``)."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Holds a processor's output for one image."""

    text: str
    """The text that replaces the image's placeholder, with every run of image tokens reduced to one."""
    removed: int
    """Number of image tokens removed from these runs."""
    tokens: int
    """Number of image tokens, each a feature of the vision tower."""
    elements: int
    """Number of elements of its pixel tensors."""


_TRIED = ((448, 336), (1100, 700))
"""Image sizes between the smallest and the largest default of every model family."""


class ImageCounter:
    """Counts the tokens of texts with images for one processor."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._mark = processor.image_token
        self._runs = re.compile(f"({re.escape(_repeated_mark(processor))})+")
        self._known: dict[Any, ImageTokens] = {}
        self.of_size = functools.cache(self._of_size)

    def _of_size(self, size: Size) -> ImageTokens:
        if (key := self._kind_of(size)) not in self._known:
            if isinstance(key, int) and self._one_patch is not None:
                text, tokens_of_patch, elements_of_patch = self._one_patch
                tokens = int(tokens_of_patch * key)
                self._known[key] = ImageTokens(text, tokens - 1, tokens, int(elements_of_patch * key))
            else:
                self._known[key] = self._process(size)
        return self._known[key]

    @functools.cached_property
    def _one_patch(self) -> tuple[str, Fraction, Fraction] | None:
        """Returns an image's text, and a patch's share of its tokens and elements, if a small and a large image agree;
        then images of other sizes are not processed."""
        of_two = set()
        for size in _TRIED:
            image, patches = self._process(size), self._kind_of(size)
            of_two.add((image.text, Fraction(image.tokens, patches), Fraction(image.elements, patches)))
        return of_two.pop() if len(of_two) == 1 else None

    def _kind_of(self, size: Size) -> Any:
        """Returns a key that is equal for image sizes with equal results."""
        width, height = size
        images = self._processor.image_processor
        if getattr(images, "do_pan_and_scan", None):  # Gemma3Processor._get_num_multimodal_tokens omits crops
            return size
        if hasattr(images, "get_number_of_image_patches"):
            return images.get_number_of_image_patches(height, width, {})
        if hasattr(self._processor, "_get_num_multimodal_tokens"):
            counts = self._processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
            return counts.num_image_tokens[0], counts.num_image_patches[0]
        return size

    def _process(self, size: Size) -> ImageTokens:
        options = self._processor._merge_kwargs(return_tensors="pt")["images_kwargs"]
        images = [[blank(f"{size[0]}x{size[1]}")]]
        processed, replacements = self._processor._process_images(images, **options)
        runs = self._runs.findall(replacements[0])
        text = self._runs.sub(lambda run: _repeated_mark(self._processor), replacements[0])
        marks = replacements[0].count(_repeated_mark(self._processor))
        pixels = processed["pixel_values"]
        elements = pixels.numel() if hasattr(pixels, "numel") else sum(each.size for each in pixels)
        return ImageTokens(text=text, removed=marks - len(runs), tokens=marks, elements=int(elements))

    def count(self, texts: Sequence[str], sizes: Sequence[Size]) -> tuple[int, int]:
        """Returns the number of tokens of a sequence, and of its part up to the last image (0 without an image)."""
        images = iter([self.of_size(size) for size in sizes])
        total = end = 0
        for text in texts:
            removed = 0

            def replaced(_: re.Match[str]) -> str:
                nonlocal removed
                image = next(images)
                removed += image.removed
                return image.text

            full = re.sub(re.escape(self._mark), replaced, text)
            if removed or full != text:
                last = full.rindex(_repeated_mark(self._processor)) + len(_repeated_mark(self._processor))
                end = total + removed + self._tokens(full[:last])
            total += removed + self._tokens(full)
        return total, end

    def _tokens(self, text: str) -> int:
        return len(self._processor.tokenizer(text, add_special_tokens=False)["input_ids"])


def _repeated_mark(processor: Any) -> str:
    """Returns the token of one image feature; Gemma has another one for a whole image."""
    return str(getattr(processor.tokenizer, "image_token", None) or processor.image_token)


def image_lengths(
    rows: Any, processor: Any, of_row: OfRow, *, processes: int | None
) -> tuple[RowLengths, ImageProfile]:
    """Counts every row's tokens and images, untruncated.

    Args:
        rows: A datasets.Dataset with a column ``image`` or ``images``.
        of_row: The method's formatting of a row.
        processes: Number of processes; None for this one alone.
    """
    sizes = _sizes(rows, processes)
    counter = ImageCounter(processor)

    def count(row: dict[str, Any], number: int) -> dict[str, Any]:
        of_image = [counter.of_size(size) for size in sizes[number]]
        counts = [counter.count(texts, sizes[number]) for texts in of_row(row, len(of_image), processor)]
        return {
            "tokens": [tokens for tokens, _ in counts],
            "end": max(end for _, end in counts),
            "image_tokens": sum(image.tokens for image in of_image),
            "elements": sum(image.elements for image in of_image),
        }

    texts = rows.remove_columns([name for name in IMAGE_COLUMNS if name in rows.column_names])
    shown = {"desc": "Counting tokens of texts and images", "num_proc": processes}
    counted = texts.map(
        count,
        with_indices=True,
        remove_columns=texts.column_names,
        keep_in_memory=True,
        load_from_cache_file=False,
        **shown,
    )
    found = counted.with_format(None)
    sequences = found["tokens"]
    lengths = RowLengths(
        longer=[max(each) for each in sequences],
        shorter=[min(each) for each in sequences] if len(sequences[0]) > 1 else (),
    )
    elements = list(found["elements"])
    worst = max(range(len(elements)), key=elements.__getitem__)
    profile = ImageProfile(
        rows_by_images=dict(Counter(map(len, sizes))),
        rows_by_image_tokens=dict(Counter(found["image_tokens"])),
        rows_by_end=dict(Counter(found["end"])),
        worst=tuple(f"{width}x{height}" for width, height in sizes[worst]),
        worst_elements=elements[worst],
    )
    return lengths, profile


def _sizes(rows: Any, processes: int | None) -> list[tuple[Size, ...]]:
    if processes is None:
        return row_image_sizes(rows)
    from datasets import Dataset

    def read(part: dict[str, int]) -> dict[str, Any]:
        return {"sizes": row_image_sizes(rows.shard(processes, part["number"], contiguous=True))}

    numbers = Dataset.from_dict({"number": range(processes)})
    shown = {"desc": "Reading sizes of images", "num_proc": processes}
    parts = numbers.map(read, keep_in_memory=True, load_from_cache_file=False, **shown)
    return [tuple((width, height) for width, height in row) for part in parts["sizes"] for row in part]
