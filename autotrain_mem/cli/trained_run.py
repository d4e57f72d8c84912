"""Reads the output folder of a finished run: what was trained, and on which base model."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from autotrain_mem.settings.knobs import BASE_BITS
from autotrain_mem.support.errors import OutputFolderError, UsageError
from autotrain_mem.support.files import read_object
from autotrain_mem.types import METHODS, PLAN_NAME, RUN_NAME, MethodFacts

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MODEL_WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Files that ``save_pretrained`` writes (``peft/utils/constants.py`` and ``transformers/utils/__init__.py``)."""

_A_RUN = "A run is the output folder of `autofit METHOD`, with the model, plan.json and run.json in it."


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """Describes a finished run. Only a few values of ``plan.json`` are read, so that runs of any version are usable."""

    folder: Path
    method: MethodFacts
    base: str
    """The model that was trained: a hub id or a folder."""
    revision: str | None
    """The base's revision on the hub."""
    base_bits: int | None
    """Bits of the quantized base during training; None if it was not quantized."""
    is_adapter: bool
    """Whether the folder holds an adapter; otherwise it holds all weights of the model."""


def find_run(path: str) -> TrainedRun:
    """Reads a run's folder. Raises UsageError if it holds no run, OutputFolderError if the run is not finished."""
    folder = Path(path)
    if not path.strip() or not folder.is_dir():
        raise UsageError(f"There is no folder {path!r}.", hint=_A_RUN)
    if not (folder / PLAN_NAME).is_file():
        inside = sorted(str(path.parent) for path in folder.glob(f"*/{PLAN_NAME}"))[:3]  # such as a quickstart's
        hint = f"It holds these runs: {', '.join(inside)}." if inside else _A_RUN
        raise UsageError(f"{path} is not the folder of a run: it holds no {PLAN_NAME}.", hint=hint)
    try:
        plan = read_object(folder / PLAN_NAME)
        method, base = METHODS[plan["method"]], os.fspath(plan["model"])
        knobs, revision = plan.get("knobs", {}), plan.get("job", {}).get("arguments", {}).get("model_revision")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        message = f"{folder / PLAN_NAME} does not name a method and model that this version of autofit supports."
        raise UsageError(message, hint=_A_RUN) from error
    has_adapter = _has(folder, ADAPTER_WEIGHTS) and (folder / "adapter_config.json").is_file()
    if not (has_adapter or _has(folder, MODEL_WEIGHTS)) or not (folder / RUN_NAME).is_file():
        message = f"The run in {folder} is not finished: it holds no trained model yet."
        raise OutputFolderError(message, hint=how_to_continue(folder, method.name))
    return TrainedRun(
        folder=folder,
        method=method,
        base=base,
        revision=str(revision) if revision else None,
        base_bits=next((bits for name, bits in BASE_BITS.items() if knobs.get(name)), None),
        is_adapter=has_adapter,
    )


def how_to_continue(folder: Path, method: str) -> str:
    """Returns the command that continues an unfinished run, or that begins it again if it has no checkpoint."""
    if any(path.is_dir() for path in folder.glob("checkpoint-*")):
        return f"{shlex.join(['autofit', method, '--output_dir', str(folder)])} --resume_from_checkpoint  continues it."
    return f"{shlex.join(['autofit', method, '--plan', str(folder)])}  trains with its plan again."


def _has(folder: Path, names: tuple[str, ...]) -> bool:
    return any((folder / name).is_file() for name in names)
