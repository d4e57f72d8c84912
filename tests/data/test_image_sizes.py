"""Sizes of images are those that the datasets library's and transformers' own readers make, without decoding."""

import base64
import io
import pathlib
from typing import Any

import pytest
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pillow
from PIL import ImageFile
from PIL.PngImagePlugin import PngInfo

from autotrain_mem.data.image_sizes import has_images, pixels, row_image_sizes
from autotrain_mem.support.errors import DatasetFormatError

TURNED, UPSIDE_DOWN = 6, 3
XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="8"/></x:xmpmeta>'


def image(size: tuple[int, int] = (30, 20), kind: str = "PNG", orientation: int = 0, **options: Any) -> bytes:
    if orientation:
        exif = Pillow.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif.tobytes()
    file = io.BytesIO()
    Pillow.new("RGB", size, "red").save(file, kind, **options)
    return file.getvalue()


def with_chunk_at_the_end(png: bytes) -> bytes:
    """EXIF behind the pixels, as some editors write it."""
    other = image(orientation=TURNED)
    start = other.index(b"eXIf") - 4
    chunk = other[start : start + 12 + int.from_bytes(other[start : start + 4], "big")]
    return png[:-12] + chunk + png[-12:]


TEXTS = PngInfo()
TEXTS.add_itxt("XML:com.adobe.xmp", XMP.decode())
FILES = {
    **{f"{kind} {turn}": image(kind=kind, orientation=turn) for kind in ("JPEG", "PNG", "WEBP") for turn in range(9)},
    "WEBP lossless": image((300, 200), "WEBP", lossless=True),
    "WEBP large": image((300, 200), "WEBP"),
    "TIFF turned": image(kind="TIFF", orientation=TURNED),
    "GIF": image(kind="GIF"),
    "BMP": image(kind="BMP"),
    "PNG with EXIF at its end": with_chunk_at_the_end(image()),
    "PNG with XMP": image(pnginfo=TEXTS),
    "JPEG with XMP": image(kind="JPEG", xmp=XMP),
    "WEBP with XMP": image(kind="WEBP", xmp=XMP),
}


def of_images(columns: dict[str, Any], **features: Any) -> Any:
    return Dataset.from_dict(columns, features=Features(features))


def test_every_kind_of_file_is_as_large_as_the_datasets_librarys_image() -> None:
    rows = of_images({"image": [{"bytes": content, "path": None} for content in FILES.values()]}, image=Image())
    decoded = {name: row["image"].size for name, row in zip(FILES, rows, strict=True)}
    assert dict(zip(FILES, row_image_sizes(rows), strict=True)) == {name: (size,) for name, size in decoded.items()}
    assert set(decoded.values()) >= {(30, 20), (20, 30)}


def test_a_path_is_as_large_as_transformers_makes_it(tmp_path: pathlib.Path) -> None:
    from transformers.image_utils import load_image

    texts = []
    for number, content in enumerate(FILES.values()):
        texts.append(str(tmp_path / str(number)))
        pathlib.Path(texts[-1]).write_bytes(content)
    texts.append("data:image/png;base64," + base64.b64encode(image()).decode())
    loaded = [(load_image(text).size,) for text in texts]
    assert row_image_sizes(Dataset.from_dict({"image": texts})) == loaded
    assert row_image_sizes(of_images({"image": texts[:-1]}, image=Image())) == loaded[:-1]
    assert row_image_sizes([{"image": text} for text in texts]) == loaded


def test_rows_hold_any_number_of_images_or_none() -> None:
    small, large = {"bytes": image((4, 4)), "path": None}, {"bytes": image((8, 6)), "path": None}
    rows = of_images({"images": [[small, large], [], None, [large]]}, images=List(Image()))
    sizes = row_image_sizes(rows)
    assert sizes == [((4, 4), (8, 6)), (), (), ((8, 6),)]
    assert list(map(pixels, sizes)) == [64, 0, 0, 48]
    assert row_image_sizes(rows.select([3, 0])) == [sizes[3], sizes[0]]
    assert row_image_sizes(list(rows)) == sizes
    assert row_image_sizes(rows.with_transform(lambda batch: {"images": batch["images"]})) == sizes
    texts = Dataset.from_dict({"messages": [[{"role": "user", "content": "Hello."}]] * 3, "text": ["a"] * 3})
    assert row_image_sizes(texts) == [()] * 3
    assert not has_images(texts.column_names)


def test_images_within_messages_count_and_marks_of_places_do_not() -> None:
    block = {"type": Value("string"), "text": Value("string"), "image": Image()}
    messages = List({"role": Value("string"), "content": List(block)})
    given = {"type": "image", "text": None, "image": {"bytes": image((4, 2)), "path": None}}
    mark, text = {"type": "image", "text": None, "image": None}, {"type": "text", "text": "?", "image": None}
    content = [[given, mark, text], [mark, text]]
    rows = of_images(
        {
            "messages": [[{"role": "user", "content": blocks}] for blocks in content],
            "images": [[{"bytes": image(), "path": None}]] * 2,
        },
        messages=messages,
        images=List(Image()),
    )
    assert row_image_sizes(rows) == [((30, 20), (4, 2)), ((30, 20),)]
    assert row_image_sizes(list(rows)) == row_image_sizes(rows)
    assert row_image_sizes(rows.remove_columns("images")) == [((4, 2),), ()]


def test_what_cannot_be_read_is_named_by_its_row(tmp_path: pathlib.Path) -> None:
    (tmp_path / "good.png").write_bytes(image())
    for value, why in (
        ("no.png", "there is no file no.png"),
        ("https://a.b/c.png", "https://a.b/c.png is on"),
    ):
        with pytest.raises(DatasetFormatError, match=f"An image of row 2 cannot be read: {why}"):
            row_image_sizes(Dataset.from_dict({"images": [[str(tmp_path / "good.png")], [value]]}))
    with pytest.raises(DatasetFormatError, match="row 1 cannot be read: cannot identify image file"):
        row_image_sizes(of_images({"image": [{"bytes": b"no image", "path": None}]}, image=Image()))


def test_no_image_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = of_images({"image": [{"bytes": image(kind=kind), "path": None} for kind in ("JPEG", "PNG")]}, image=Image())
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    assert row_image_sizes(rows) == [((30, 20),)] * 2
