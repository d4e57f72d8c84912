"""Refuses models and data of this machine that cannot be read, by their files alone: no library is asked."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autotrain_mem.support.errors import (
    DatasetNotFoundError,
    EmptyDatasetError,
    MalformedDatasetError,
    MissingExtraError,
    ModelConfigError,
    ModelNotFoundError,
)

DATA_KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""Endings of the files that rows are read from, and what the datasets library calls each kind."""
WHAT_IS_READ = (
    "Give --dataset a .json, .jsonl, .parquet or .csv file, a folder, or a hub id that can be reached from here."
)
ONE_ROW = "Give --dataset a file with at least one row."
_PATHS = ("/", "./", "../", "~")
"""How a name begins that is no hub id."""
_MOST_SLASHES = 1
"""A hub id is NAME or OWNER/NAME (huggingface_hub/utils/_validators.py: validate_repo_id)."""
_CHECK_PATH = "Check the path that --dataset gives."


def saved_model(flag: str) -> str:
    """Returns what a flag takes that names a model, for a hint."""
    return f"Give {flag} a folder made by save_pretrained, or a hub id such as Qwen/Qwen2.5-0.5B."


def check_model_folder(name: str, flag: str) -> dict[str, Any] | None:
    """Reads ``config.json`` of a model's folder; None for a hub id, as far as one can tell from here.

    Raises:
        ModelNotFoundError: a file, or a folder that holds no model.
        ModelConfigError: the file is no JSON, or says nothing of a model.
    """
    path = Path(name)
    if path.is_file():
        raise ModelNotFoundError(f"{path} is a file.", hint=f"Give the folder that holds it: {flag} {path.parent}")
    if is_path(name) and not path.exists():
        raise ModelNotFoundError(f"No folder {name}.", hint=f"Check the path that {flag} gives.")
    if not path.is_dir():
        return None
    file = path / "config.json"
    if not file.is_file() and (path / "adapter_config.json").is_file():
        raise ModelNotFoundError(
            f"{path} holds a LoRA adapter and not the model that it belongs to.",
            hint=f"Merge it into its base first, and give {flag} the result: peft's AutoPeftModelForCausalLM (a reward "
            "model: AutoPeftModelForSequenceClassification) has from_pretrained, merge_and_unload and save_pretrained.",
        )
    if not file.is_file():
        raise ModelNotFoundError(f"{path} holds no config.json.", hint=saved_model(flag))
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ModelConfigError(
            f"{file} is not JSON: line {error.lineno}, column {error.colno} ({error.msg}).",
            hint="Download or save the model again: the file is probably cut short.",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelConfigError(f"{file} cannot be read: {error}.", hint="Download or save the model again.") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelConfigError(f"{file} names no model_type, so it is not a model's config.", hint=saved_model(flag))
    return config


_OF_ALL_IMAGES = {"PIL": "Pillow"}
_OF_A_FAMILY = {"smolvlm": {"num2words": "num2words"}}
"""What a processor asks for as it is made (``transformers/models/smolvlm/processing_smolvlm.py: __init__``). Where
torchvision is missing, images are processed by Pillow alone."""
VISION_EXTRA = 'Run: pip install "autotrain_mem[vision]"'


def check_image_packages(model: str, model_type: str) -> None:
    """Refuses a model that reads images where what reads them is missing: its processor cannot be made then, nor its
    tokenizer, which is a part of that.

    Raises:
        MissingExtraError: names the packages, and our extra, which installs them.
    """
    needed = _OF_ALL_IMAGES | _OF_A_FAMILY.get(model_type, {})
    missing = [package for name, package in needed.items() if find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise MissingExtraError(
            f"{model} reads images, and {' and '.join(missing)} {are} not installed.", hint=VISION_EXTRA
        )


def is_path(name: str) -> bool:
    """Tells whether a name cannot be a hub id."""
    return name.startswith(_PATHS) or name.count("/") > _MOST_SLASHES


def check_data_path(name: str) -> None:
    """Refuses data that are not there, are empty, or of a kind that is not read; what is no path is a hub id.

    Raises:
        DatasetNotFoundError, EmptyDatasetError, MalformedDatasetError.
    """
    path = Path(name)
    if path.suffix.lower() in DATA_KINDS and not path.is_dir():
        if not path.is_file():
            raise DatasetNotFoundError(f"No file {path}.", hint=_CHECK_PATH)
        if path.stat().st_size == 0:
            raise EmptyDatasetError(f"{path} is empty.", hint=ONE_ROW)
    elif path.is_file():
        raise MalformedDatasetError(f"{name} is not a kind of file that is read here.", hint=WHAT_IS_READ)
    elif is_path(name) and not path.exists():
        raise DatasetNotFoundError(f"No file or folder {name}.", hint=_CHECK_PATH)
