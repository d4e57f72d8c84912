"""Finds a training that is done in its output folder: what was trained, on which base, and what is missing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotrain_mem.methods.facts import MethodFacts
from autotrain_mem.methods.table import METHODS
from autotrain_mem.support.errors import OutputFolderError, UsageError
from autotrain_mem.support.files import read_start
from autotrain_mem.types.knobs import BASE_BITS
from autotrain_mem.types.plan_file import LARGEST_BYTES, PLAN_NAME
from autotrain_mem.types.report import RUN_NAME

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MODEL_WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""What ``save_pretrained`` writes (``peft/utils/constants.py`` and ``transformers/utils/__init__.py``)."""

_A_RUN = "A run is the output folder of `autofit METHOD`, with the model, plan.json and run.json in it."


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """Holds what an output folder says of the training that is done in it.

    Of ``plan.json`` these few values are read as they stand: what was trained with another autofit, whose plan this one
    cannot follow, is a model all the same.
    """

    folder: Path
    method: MethodFacts
    base: str
    """The model that was trained: a hub id, or a folder."""
    revision: str | None
    """Of the base, on the hub."""
    base_bits: int | None
    """The base was quantized to so many bits while it was trained."""
    is_adapter: bool
    """Else the folder holds all weights of the model."""
    steps: int
    """Optimizer steps that were trained."""


def find_run(path: str) -> TrainedRun:
    """Read the folder of a run that has ended well.

    Raises:
        UsageError: there is no such folder, or no run of ours in it.
        OutputFolderError: the run has not come to its end.
    """
    folder = Path(path)
    if not path.strip() or not folder.exists():
        raise UsageError(f"There is no folder {path!r}.", hint=_A_RUN)
    if not folder.is_dir():
        raise UsageError(f"{path} is a file, not the folder of a run.", hint=_A_RUN)
    if not (folder / PLAN_NAME).is_file():
        inside = _runs_within(folder)
        hint = f"It holds these runs: {', '.join(inside)}." if inside else _A_RUN
        raise UsageError(f"{path} is not the folder of a run: it holds no {PLAN_NAME}.", hint=hint)
    plan = _read(folder / PLAN_NAME)
    method, base, arguments = plan.get("method"), plan.get("model"), _mapping(plan, "job", "arguments")
    if not isinstance(method, str) or method not in METHODS or not isinstance(base, str):
        raise UsageError(f"{folder / PLAN_NAME} names no method and model that this autofit knows.", hint=_A_RUN)
    has_adapter = _has(folder, ADAPTER_WEIGHTS) and (folder / ADAPTER_CONFIG).is_file()
    if not (has_adapter or _has(folder, MODEL_WEIGHTS)) or not (folder / RUN_NAME).is_file():
        raise _unfinished(folder, method)
    steps, knobs = _read(folder / RUN_NAME).get("steps"), _mapping(plan, "knobs")
    return TrainedRun(
        folder=folder,
        method=METHODS[method],
        base=base,
        revision=str(arguments["model_revision"]) if arguments.get("model_revision") else None,
        base_bits=next((bits for name, bits in BASE_BITS.items() if knobs.get(name)), None),
        is_adapter=has_adapter,
        steps=steps if isinstance(steps, int) else 0,
    )


def _unfinished(folder: Path, method: str) -> OutputFolderError:
    """Say how far a run came that wrote no trained model at its end."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.is_dir()]
    steps = _read(folder / RUN_NAME).get("steps")
    came = f" It ended after step {steps}." if steps else ""
    go_on = f"autofit {method} --output_dir {folder} --resume_from_checkpoint  continues it."
    again = f"autofit {method} --plan {folder}  trains with its plan again."
    return OutputFolderError(
        f"The run in {folder} is not finished: it holds no trained model yet.{came}",
        hint=go_on if checkpoints else again,
    )


def _has(folder: Path, names: tuple[str, ...]) -> bool:
    return any((folder / name).is_file() for name in names)


def _read(path: Path) -> dict[str, Any]:
    """The content of a file; empty where it cannot be read, so that what is missing in it can be said."""
    try:
        content = json.loads(read_start(path, LARGEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _mapping(content: dict[str, Any], *keys: str) -> dict[str, Any]:
    for key in keys:
        inner = content.get(key)
        content = inner if isinstance(inner, dict) else {}
    return content


def _runs_within(folder: Path) -> list[str]:
    """Names some runs one level down, for who gave the folder of a quickstart or of several runs."""
    return sorted(str(path.parent) for path in folder.glob(f"*/{PLAN_NAME}"))[:3]
