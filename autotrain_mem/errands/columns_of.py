"""Tells the columns of a dataset: of a text file from its first row, of anything else in a process that loads it."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotrain_mem.errands.child import finish
from autotrain_mem.errands.errand import Errand
from autotrain_mem.support.errors import DatasetNotFoundError, EmptyDatasetError, MalformedDatasetError
from autotrain_mem.support.units import MIB

LARGEST_LINE = 16 * MIB
"""Of a text file whose first row is looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Holds what the first look at a dataset says."""

    names: tuple[str, ...]
    rows: int | None = None
    """None where they were not counted."""


def columns_of(dataset: str) -> Columns:
    """Look at a file, a folder or a hub id.

    Raises:
        DatasetError: there is none, it is empty, or its first row cannot be read.
    """
    path = Path(dataset).expanduser()
    if path.suffix.lower() in (".jsonl", ".json", ".csv"):
        return Columns(names=_of_text_file(path))
    if not path.exists() and (path.suffix.lower() == ".parquet" or dataset.startswith((".", "/", "~"))):
        raise _not_there(dataset)
    end = finish(Errand(task="columns", dataset=str(path) if path.exists() else dataset))
    return Columns(names=tuple(end["columns"]), rows=end["rows"])


def _of_text_file(path: Path) -> tuple[str, ...]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".csv":
                return tuple(next(csv.reader(file)))
            return tuple(_first_object(file))
    except FileNotFoundError as error:
        raise _not_there(str(path)) from error
    except StopIteration as error:
        raise EmptyDatasetError(f"{path} has no rows.", hint="Give --dataset a file with at least one row.") from error
    except (OSError, ValueError, csv.Error) as error:
        hint = "A .json or .jsonl file holds objects, all with the same keys; a .csv file begins with the columns."
        raise MalformedDatasetError(f"The first row of {path} cannot be read: {error}.", hint=hint) from error


def _first_object(file: Any) -> dict[str, Any]:
    """The first row: of a file with an object in each line, or of a list of objects."""
    line = next(text for text in iter(lambda: file.readline(LARGEST_LINE), "") if text.strip())
    try:
        first = json.loads(line)
    except ValueError:
        first = json.loads(line + file.read())  # over several lines
    if isinstance(first, list):
        first = next(iter(first))
    if not isinstance(first, dict):
        raise ValueError("it is no object")
    return first


def _not_there(dataset: str) -> DatasetNotFoundError:
    return DatasetNotFoundError(f"No file or folder {dataset}.", hint="Check the path that --dataset gives.")
