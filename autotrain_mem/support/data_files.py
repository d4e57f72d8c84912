"""Reads data files without the datasets library: their kind, their first rows, and the line that is wrong."""

import bz2
import contextlib
import csv
import gzip
import json
import lzma
import pathlib
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from autotrain_mem.support.errors import MalformedDatasetError

DATA_KINDS = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **{".parquet": "parquet", ".arrow": "arrow"},
}
"""Suffix of a data file -> the datasets library's name of its kind."""
HOW_TO_MEND = {
    "json": "A .jsonl file has a JSON object on each line, a .json file that or a list of objects, with the same keys "
    "of the same types.",
    "csv": "The first line names the columns; a value with commas, quotes or line breaks needs quotes.",
    **dict.fromkeys(("parquet", "arrow"), "The file is truncated or of another kind: write or download it again."),
}
"""Kind of a data file -> how it can be read."""
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""Suffix of a compressed file, which the datasets library unpacks by itself (``datasets/utils/extract.py: Extractor``).
Others need packages: zstandard, lz4, rarfile, py7zr."""
UNPACKING = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
"""The errors of a file that is not compressed, or that is cut short. Those of bz2 are an OSError."""
_OF_LINES = (".jsonl", ".ndjson")
_HEAD_BYTES = 2**20
"""The bytes in which a file's first rows are looked for; they take 10 ms to read."""
_FIRST_ROWS = 100
_WRAPPED = re.compile(r'\s*\{\s*"([^"]+)"\s*:\s*\[\s*\{')
"""One object whose first value is a list of objects."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Holds what the start of a file shows."""

    names: list[str]
    """The columns: the first line of a .csv file, or all keys of the rows."""
    rows: list[Any]
    """The first rows of a .json or .jsonl file; empty for .csv."""
    separator: str = ","
    """The character that separates most names in the first line of a .csv file."""
    is_whole: bool = True
    """Whether these are all rows."""


def is_compressed(path: pathlib.Path) -> bool:
    """Returns whether a file is unpacked when it is read."""
    return path.suffix.lower() in _OPENERS


def suffix_of(name: str | pathlib.PurePath) -> str:
    """Returns the suffix of a data file, without that of its compression.

    >>> suffix_of("rows.jsonl.gz"), suffix_of("Rows.CSV"), suffix_of("rows.zip")
    ('.jsonl', '.csv', '.zip')
    """
    path = pathlib.PurePath(name)
    return (pathlib.PurePath(path.stem) if path.suffix.lower() in _OPENERS else path).suffix.lower()


def opened(path: pathlib.Path) -> Any:
    """Opens a file to read its bytes, unpacked. Reading raises OSError or one of :data:`UNPACKING`."""
    return _OPENERS.get(path.suffix.lower(), open)(path, "rb")


def read_head(path: pathlib.Path) -> Head:
    """Reads the start of a .json, .jsonl or .csv file. Raises MalformedDatasetError, with the line if one is wrong."""
    try:
        with opened(path) as file:
            content = file.read(_HEAD_BYTES)
    except (*UNPACKING, OSError) as error:
        raise MalformedDatasetError(
            f"{path} cannot be read: {why_unreadable(path)}.", hint="Compress the file again, or download it again."
        ) from error
    text, is_whole = content.decode("utf-8-sig", errors="replace").strip(), len(content) < _HEAD_BYTES
    if DATA_KINDS[suffix_of(path)] == "csv":
        line = text.splitlines()[:1]
        columns = {separator: next(csv.reader(line, delimiter=separator), []) for separator in ",;\t|"}
        most = max(columns, key=lambda separator: len(columns[separator]))
        return Head(names=columns[","], rows=[], separator=most)
    is_of_lines, place = suffix_of(path) in _OF_LINES, 0
    rows: list[Any] = []
    if re.match(r"\[\s*[{\]]", text):  # the datasets library takes a list of objects in a .jsonl file, too
        text, is_of_lines = text[1:].removesuffix("]").strip(), False
    with contextlib.suppress(json.JSONDecodeError, RecursionError):
        while len(rows) < _FIRST_ROWS and place < len(text):
            row, place = json.JSONDecoder().raw_decode(text, place)
            rows.append(row)
            place += len(text[place:]) - len(text[place:].lstrip(" ,\r\n\t"))
    rest = text[place:]
    if (rest and len(rows) < _FIRST_ROWS) or not all(isinstance(row, dict) for row in rows):
        if (is_whole or (is_of_lines and "\n" in rest)) and (why := why_unreadable(path)):
            raise MalformedDatasetError(f"{path} cannot be read: {why}.", hint=HOW_TO_MEND["json"])
        if not rows and (wrapped := _WRAPPED.match(text)):
            rows = [{wrapped[1]: [{}]}]
    rows = [row for row in rows if isinstance(row, dict)]
    return Head(names=[*dict.fromkeys(name for row in rows for name in row)], rows=rows, is_whole=is_whole and not rest)


def row_place(name: str, row: int) -> str:
    """Returns where a row stands, counted from 0: ``line 3`` of a file of lines, of which blank ones hold no row; else
    ``row 3``."""
    if suffix_of(name) in _OF_LINES:
        with opened(pathlib.Path(name)) as lines:
            filled = (number for number, line in enumerate(lines, 1) if line.strip())
            for at, number in enumerate(filled):
                if at == row:
                    return f"line {number}"
    return f"row {row + 1}"


def undecodable_line(path: pathlib.Path) -> str:
    """Returns the first line that is not UTF-8, as ``line 3``, or an empty text."""
    if DATA_KINDS.get(suffix_of(path)) not in ("json", "csv"):
        return ""
    with opened(path) as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return f"line {number}"
    return ""


def why_unreadable(path: pathlib.Path) -> str:
    """Returns the line of a file that cannot be read, and the reason; empty if unknown."""
    try:
        if where := undecodable_line(path):
            return f"{where} is not UTF-8"
        if DATA_KINDS.get(suffix_of(path)) != "json":
            return ""
        with opened(path) as file:
            return _why_no_json(file, is_of_lines=suffix_of(path) in _OF_LINES)
    except (*UNPACKING, OSError) as error:
        return f"it cannot be unpacked ({error})"
    except RecursionError:
        return "it is nested too deeply"


def _why_no_json(file: IO[bytes], *, is_of_lines: bool) -> str:
    with contextlib.suppress(json.JSONDecodeError):
        is_of_lines = is_of_lines or isinstance(json.loads(file.readline().decode("utf-8-sig")), dict)
    file.seek(0)
    for number, line in enumerate(file if is_of_lines else [file.read()], 1):
        text = line.decode("utf-8-sig").rstrip()  # so a truncated row ends here, not at the start of the next line
        if is_of_lines and not text:
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            return f"line {number if is_of_lines else error.lineno}, column {error.colno} is not JSON ({error.msg})"
        if is_of_lines and not isinstance(row, dict):
            return f"line {number} is not a JSON object"
    return ""
