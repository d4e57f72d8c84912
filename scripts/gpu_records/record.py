"""The record of one run on a card: a small JSON file with everything needed to predict the run."""

import contextlib
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from autotrain_mem.support import codec
from autotrain_mem.support.codec import Form
from gpu_records.cases import GpuCase
from gpu_records.history import History

SCHEMA = "autofit.gpu_record/1"
FAILURE_SCHEMA = "autofit.gpu_failure/1"
VERSIONED = ("torch", "trl", "transformers", "peft", "bitsandbytes", "accelerate", "datasets")


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFacts:
    """The device, as described by torch and NVML."""

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    total_bytes: int
    """Total memory, as reported by torch."""
    driver: str | None
    cuda: str | None
    is_real: bool
    """False for a dry run on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """Current and peak bytes of torch's allocator."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outside:
    """The card's memory that the process holds in addition to torch's reserved bytes, and the source of the figure."""

    non_torch_bytes: int | None
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    json_form: ClassVar = Form(schema=SCHEMA)

    case: GpuCase
    model_files: Mapping[str, str]
    card: CardFacts
    versions: Mapping[str, str | None]
    date: str
    seed: int
    allocator: str
    """PYTORCH_ALLOC_CONF of the process."""
    loaded: Levels
    """After the trainer was built."""
    trained: Levels
    """After the last step; its peaks are those of the whole process."""
    outside: Outside
    memory_stats: Mapping[str, int]
    """torch.cuda.memory_stats()."""
    seconds: Mapping[str, float]
    history: History


def versions(packages: Sequence[str] = VERSIONED) -> dict[str, str | None]:
    """Returns the versions of packages, by default of those that determine memory; None for a missing one."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def record_path(folder: Path, case: str) -> Path:
    return folder / f"{case}.record.json"


def failure_path(folder: Path, case: str) -> Path:
    return folder / f"{case}.failure.json"


def write(folder: Path, record: Record) -> None:
    """Writes the record, and removes a failure file of the same case."""
    write_json(record_path(folder, record.case.name), codec.to_json(record))
    failure_path(folder, record.case.name).unlink(missing_ok=True)


def write_failure(folder: Path, case: GpuCase, error: str) -> None:
    write_json(failure_path(folder, case.name), {"schema": FAILURE_SCHEMA, "case": codec.to_json(case), "error": error})


def read_records(folder: Path) -> list[Record]:
    paths = sorted(folder.glob(f"*{record_path(folder, '').name}"))
    return [codec.from_json(Record, json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def read_failures(folder: Path) -> dict[str, str]:
    """Returns the errors of all failed cases, by case name."""
    found = (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.failure.json"))
    return {failure["case"]["name"]: failure["error"] for failure in found}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content) + "\n", encoding="utf-8")
    os.replace(partial, path)
