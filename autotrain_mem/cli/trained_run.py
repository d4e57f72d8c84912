"""Reads the output folder of a training that has ended: what was trained, and on which base model."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotrain_mem.settings.knobs import BASE_BITS
from autotrain_mem.support.errors import ModelNotFoundError, OutputFolderError, UsageError
from autotrain_mem.support.files import read_start
from autotrain_mem.types.methods_table import METHODS, MethodFacts
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
    """The base's revision on the hub."""
    base_bits: int | None
    """The base was quantized to so many bits while it was trained."""
    is_adapter: bool
    """Whether the folder holds an adapter; else it holds all weights of the model."""
    trust_remote_code: bool = False

    @property
    def weights_from(self) -> str:
        """The model whose weights are loaded: the base of an adapter, or the folder itself."""
        return self.base if self.is_adapter else str(self.folder)


def find_run(path: str) -> TrainedRun:
    """Reads the folder of a run that has ended well.

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
        inside = sorted(str(path.parent) for path in folder.glob(f"*/{PLAN_NAME}"))[:3]  # of a quickstart, say
        hint = f"It holds these runs: {', '.join(inside)}." if inside else _A_RUN
        raise UsageError(f"{path} is not the folder of a run: it holds no {PLAN_NAME}.", hint=hint)
    plan = _read(folder / PLAN_NAME)
    method, base, arguments = plan.get("method"), plan.get("model"), _mapping(plan, "job", "arguments")
    if not isinstance(method, str) or method not in METHODS or not isinstance(base, str):
        raise UsageError(f"{folder / PLAN_NAME} names no method and model that this autofit knows.", hint=_A_RUN)
    has_adapter = _has(folder, ADAPTER_WEIGHTS) and (folder / ADAPTER_CONFIG).is_file()
    if not (has_adapter or _has(folder, MODEL_WEIGHTS)) or not (folder / RUN_NAME).is_file():
        has_checkpoints = any(path.is_dir() for path in folder.glob("checkpoint-*"))
        steps = _read(folder / RUN_NAME).get("steps")
        go_on = f"autofit {method} --output_dir {folder} --resume_from_checkpoint  continues it."
        raise OutputFolderError(
            f"The run in {folder} is not finished: it holds no trained model yet."
            f"{f' It ended after step {steps}.' if steps else ''}",
            hint=go_on if has_checkpoints else f"autofit {method} --plan {folder}  trains with its plan again.",
        )
    knobs = _mapping(plan, "knobs")
    return TrainedRun(
        folder=folder,
        method=METHODS[method],
        base=base,
        revision=str(arguments["model_revision"]) if arguments.get("model_revision") else None,
        base_bits=next((bits for name, bits in BASE_BITS.items() if knobs.get(name)), None),
        is_adapter=has_adapter,
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


def with_base(run: TrainedRun, base: str | None) -> TrainedRun:
    """Replaces the base model of an adapter by the one that the user names, and checks that a folder is there.

    Raises:
        UsageError: a base is named, and the run has none.
        ModelNotFoundError: the base was a folder, which is not there any more.
    """
    if not run.is_adapter:
        if base is not None:
            raise UsageError(f"{run.folder} holds the whole model: it needs no base.", hint="Remove --base.")
        return run
    place = base or run.base
    if place.startswith((".", "/", "~")) or place.count("/") != 1:  # it looks like a folder
        if not Path(place).expanduser().is_dir():
            raise ModelNotFoundError(
                f"The adapter in {run.folder} belongs to the model {place}, and there is no such folder.",
                hint="Give --base the folder or the hub id where that model is now.",
            )
        place = str(Path(place).expanduser())
    return replace(run, base=place, revision=None if base is not None else run.revision)


def merge_target(run: TrainedRun, out: str | None) -> Path:
    """Returns the folder of the merged model: by default beside the run, with ``-merged`` behind its name.

    Raises:
        UsageError: there is nothing to merge.
        OutputFolderError: the folder exists, or its parent does not.
    """
    if not run.is_adapter:
        raise UsageError(
            f"{run.folder} holds the whole model: all of its weights were trained, so there is nothing to merge.",
            hint=f'Use it as it is: AutoModelForCausalLM.from_pretrained("{run.folder}"), or autofit push {run.folder}',
        )
    folder = run.folder.resolve()
    target = Path(out).expanduser() if out else folder.with_name(f"{folder.name}-merged")
    if target.exists():
        raise OutputFolderError(f"{target} exists, and is not written over.", hint="Give --out a new folder.")
    if not target.absolute().parent.is_dir():
        raise OutputFolderError(
            f"There is no folder {target.absolute().parent} to write to.", hint="Make it, or give --out another."
        )
    return target


def quantized_note(run: TrainedRun) -> str | None:
    """Explains an adapter that was trained on a quantized base; None for any other model."""
    if not run.is_adapter or run.base_bits is None:
        return None
    return (
        f"the adapter was trained on the base in {run.base_bits} bits, and is laid over its full weights here: "
        "these differ a little from what it has learned beside, so compare an answer or two"
    )
