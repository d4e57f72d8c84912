"""Reduces the results of a case to values that are equal in every run of the same code.

A trace is too long to store, so each of its columns becomes a digest. Columns are read from the fields of the
dataclasses, independent of how traces are serialized. JSON is stored without the values that differ from run to run.
"""

import hashlib
import json
import pathlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from autotrain_mem.types import Block

Json = Any

MEASURED = ("seconds", "rehearsal_seconds", "started_at", "ended_at")
"""Keys of measured times. ``step_seconds`` is measured only in probes, and predicted everywhere else."""
INSTALLED = ("schema", "versions")
"""Keys that depend on the installed packages and on the file format."""
OF_THE_HOST = ("free_bytes", "budget_bytes")
"""Keys that depend on the host's free memory in an estimate for the CPU."""
_DIGITS = 16


def settled(value: Json, place: pathlib.Path, within: str = "") -> Json:
    """Returns JSON without measured times, versions, and the path of the working folder."""
    if isinstance(value, Mapping):
        left_out = {*INSTALLED, *MEASURED, *(("step_seconds",) if within == "probes" else ())}
        device = value.get("hardware", value)
        if isinstance(device, Mapping) and device.get("origin") == "cpu":
            left_out |= {*OF_THE_HOST}
        return {name: settled(each, place, name) for name, each in value.items() if name not in left_out}
    if isinstance(value, list):
        return [settled(each, place, within) for each in value]
    if isinstance(value, str):
        return value.replace(f"{place}/", "").replace(str(place), ".")
    return value


def columns(noun: Any) -> dict[str, Json]:
    """Returns the fields of a dataclass. Numbers and texts stay; lists of rows become one digest for each column.

    Example: ``{"operators": 5120, "events": "9210 values, 3f0c...", "blocks.owner": "4605 values, 91ab..."}``.
    """
    found: dict[str, Json] = {}
    for each in fields(noun):
        name, value = each.name, getattr(noun, each.name)
        if name in MEASURED:
            continue
        if is_dataclass(value):
            found |= {f"{name}.{inner}": column for inner, column in columns(value).items()}
        elif value is None or isinstance(value, str | int | float):
            found[name] = _plain(value) if isinstance(value, Enum) else value
        elif isinstance(value, Sequence) and value and (isinstance(value[0], Block) or is_dataclass(value[0])):
            names = value[0]._fields if isinstance(value[0], Block) else [row.name for row in fields(value[0])]
            found |= {f"{name}.{inner}": digest([getattr(row, inner) for row in value]) for inner in names}
        elif isinstance(value, Sequence) and all(isinstance(row, str) for row in value):
            found[name] = list(value)
        else:
            found[name] = digest(value)
    return found


def digest(values: Any) -> str:
    """Returns the number of values and a digest of them: ``"4605 values, 91ab..."``."""
    text = json.dumps(values, default=_plain)
    return f"{len(values)} values, {hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"


def file_digest(path: pathlib.Path) -> str:
    content = path.read_bytes()
    return f"{len(content)} bytes, {hashlib.sha256(content).hexdigest()[:_DIGITS]}"


def _plain(value: Any) -> Json:
    """Converts a value that JSON does not support. Raises TypeError for an unknown type."""
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"no digest of a {type(value).__name__}")
