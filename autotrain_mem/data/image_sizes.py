"""Reads the image sizes of every row, without decoding if the files' headers suffice."""

import base64
import contextlib
import io
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from autotrain_mem.support.errors import AutofitError, DatasetFormatError, MissingExtraError
from autotrain_mem.support.sources import VISION_EXTRA

Size = tuple[int, int]
"""Width and height in pixels, after applying the EXIF orientation."""

IMAGE_COLUMNS = ("image", "images")
"""If both columns exist, the first is read (``trl/trainer/sft_trainer.py: DataCollatorForVisionLanguageModeling``)."""
CONVERSATIONS = ("messages", "prompt")
"""Columns whose messages may hold images of their own (``trl/data_utils.py: prepare_multimodal_messages``)."""

_ROWS_AT_ONCE = 100
"""The most rows whose images are in memory at once, as in their files."""
_TURNED = (5, 6, 7, 8)
"""EXIF orientations that swap width and height (``PIL/ImageOps.py: exif_transpose``)."""
_TOLD_BY_HEAD = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "AVIF")
"""Formats whose header holds the orientation; a PNG may also hold it in chunks at its end. Others are decoded: Pillow
turns a TIFF upright and then drops the orientation (``PIL/TiffImagePlugin.py: load_end``)."""
_PNG_TEXTS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
"""PNG chunks that may hold an orientation (``PIL/PngImagePlugin.py: PngImageFile.load_end``)."""
_TELLING = {"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"}
"""Entries of an image's info that may hold an orientation (``PIL/Image.py: Image.getexif``)."""


def row_image_sizes(rows: Any) -> list[tuple[Size, ...]]:
    """Returns the sizes of the images of every row, in the order of the rows. ``rows``: a datasets.Dataset, or mappings
    by column. Images are in the columns ``image`` or ``images`` (images, paths, ``data:`` addresses, objects with
    ``bytes`` or ``path``, lists of them) and in messages' contents. Raises DatasetFormatError, naming the row, if an
    image cannot be read or is on another machine."""
    sizes = []
    for number, row in enumerate(_undecoded(rows), 1):
        try:
            sizes.append(tuple(map(_size, _images(row))))
        except AutofitError:
            raise
        except Exception as error:  # PIL's readers of broken files raise anything
            raise DatasetFormatError(
                f"An image of row {number} cannot be read: {error}.",
                hint="Drop the row, or put the image at its path; download images from other machines beforehand.",
            ) from error
    return sizes or [()] * len(rows)


def image_files(rows: Any) -> Iterator[tuple[str, os.stat_result]]:
    """Yields the local image files that rows name, with their status (see :func:`row_image_sizes`)."""
    for row in _undecoded(rows):
        for image in _images(row):
            if isinstance(image, Mapping):
                image = None if image.get("bytes") is not None else image.get("path")
            if isinstance(image, str):
                with contextlib.suppress(OSError, ValueError):  # a URL, or not a path
                    if stat.S_ISREG((status := os.stat(image)).st_mode):
                        yield image, status


def _undecoded(rows: Any) -> Iterator[Mapping[str, Any]]:
    """Yields rows of the columns that may hold images, undecoded."""
    formatted = getattr(rows, "format", None)
    if formatted is None or formatted["type"] == "custom":  # a transform makes the rows that training gets
        yield from rows
        return
    from datasets import Features

    names = [name for name in IMAGE_COLUMNS if name in rows.features][:1]
    names += [name for name in CONVERSATIONS if name in rows.features and _may_hold_images(rows.features[name])]
    kept = rows.select_columns(names)
    if not kept.column_names:
        return
    undecoded = Features({name: _without_decoding(feature) for name, feature in kept.features.items()})
    for table in kept.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
        yield from map(undecoded.decode_example, table.to_pylist())


def _images(row: Mapping[str, Any]) -> Iterator[Any]:
    column = next((name for name in IMAGE_COLUMNS if row.get(name) is not None), None)
    if column is not None:
        yield from _each(row[column])
    for name in CONVERSATIONS:
        messages = row.get(name)
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, Mapping) else None
            for block in content if isinstance(content, list) else ():
                if isinstance(block, Mapping) and block.get("type") == "image":  # a placeholder has no image
                    yield from _each(block.get("image"))


def pixels(sizes: Iterable[Size]) -> int:
    """Returns the number of pixels of a row's images.

    >>> pixels([(640, 480), (10, 10)]), pixels([])
    (307300, 0)
    """
    return sum(width * height for width, height in sizes)


def has_images(columns: Sequence[str]) -> bool:
    """Returns whether TRL treats data with these columns as images (``trl/trainer/sft_trainer.py: __init__``)."""
    return any(name in columns for name in IMAGE_COLUMNS)


def _may_hold_images(feature: Any) -> bool:
    """Returns whether messages can hold images: contents of blocks can, contents of plain text cannot."""
    from datasets import Json

    if isinstance(feature, Json):
        return True
    if isinstance(feature, Mapping):
        return "image" in feature or any(map(_may_hold_images, feature.values()))
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return inner is not None and _may_hold_images(inner)


def _without_decoding(feature: Any) -> Any:
    from datasets import Image, LargeList, List

    if isinstance(feature, Image):
        return Image(mode=feature.mode, decode=False)
    if isinstance(feature, Mapping):
        return {name: _without_decoding(value) for name, value in feature.items()}
    if isinstance(feature, list):
        return [_without_decoding(feature[0])]
    return type(feature)(_without_decoding(feature.feature)) if isinstance(feature, (List, LargeList)) else feature


def _each(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _each(each)
    elif value is not None:
        yield value


def _size(value: Any) -> Size:
    if isinstance(value, str):
        # Reads a text as ``transformers/image_utils.py: load_image`` does, except for URLs.
        text = value
        if os.path.isfile(text):
            return _size_in_file(text)
        if text.startswith(("http://", "https://")):
            raise ValueError(f"{text} is on another machine")
        try:
            content = base64.decodebytes(text.removeprefix("data:image/").rpartition(",")[2].encode())
            return _size_in_file(io.BytesIO(content))
        except (OSError, ValueError) as error:
            raise ValueError(f"there is no file {text[:200]}") from error
    if isinstance(value, Mapping):
        # Reads an object as ``datasets/features/image.py: Image.decode_example`` does.
        if value.get("bytes") is not None:
            return _size_in_file(io.BytesIO(value["bytes"]))
        if (path := value.get("path")) is None:
            raise ValueError("it has neither bytes nor a path")
        if os.path.isfile(path) or "://" not in path:
            return _size_in_file(path)
        from datasets import Image

        width, height = Image().decode_example({"bytes": None, "path": path}).size  # within an archive, or on a hub
        return width, height
    if hasattr(value, "getexif"):
        return _upright(value, value.getexif())
    raise ValueError(f"a {type(value).__name__} is not an image")


def _size_in_file(file: Any) -> Size:
    if isinstance(file, str):
        with open(file, "rb") as opened:
            return _size_in_file(opened)
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError(
            "The data have images, but Pillow, which reads them, is not installed.", hint=VISION_EXTRA
        ) from error

    with Image.open(file) as image:
        if image.format not in _TOLD_BY_HEAD or (image.format == "PNG" and _tells_at_its_end(image.fp)):
            image.load()
            return _upright(image, image.getexif())
        if not image.info.keys() & _TELLING:
            return int(image.width), int(image.height)
        return _upright(image, Image.Image.getexif(image))  # PngImageFile's own method would decode the image


def _upright(image: Any, exif: Mapping[int, Any]) -> Size:
    from PIL.ExifTags import Base

    width, height = int(image.width), int(image.height)
    return (height, width) if exif.get(Base.Orientation) in _TURNED else (width, height)


def _tells_at_its_end(file: Any) -> bool:
    """Returns whether text or EXIF chunks follow a PNG's pixels."""
    file.seek(8)
    is_after = False
    while len(head := file.read(8)) == 8 and head[4:] != b"IEND":
        if is_after and head[4:] in _PNG_TEXTS:
            return True
        is_after = is_after or head[4:] == b"IDAT"
        file.seek(int.from_bytes(head[:4], "big") + 4, io.SEEK_CUR)
    return False
