"""Loads the training data as ``trl sft`` does, from a hub id, a folder or a file, and says what is wrong with it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from autotrain_mem.errors import (
    DatasetFormatError,
    DatasetNotFoundError,
    EmptyDatasetError,
    MalformedDatasetError,
    UsageError,
)
from autotrain_mem.rehearsal.methods import sft
from autotrain_mem.spec.job import EXAMPLE_DATASETS, Job

FILE_KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}

_FORMATS = (("messages",), ("conversations",), ("prompt", "completion"), ("input_ids",))
"""Sets of columns that SFTTrainer reads, beside the text column (trl/trainer/sft_trainer.py: _prepare_dataset)."""


def load(job: Job, filled: sft.Configs) -> Any:
    """The dataset's splits, as ``{"train": Dataset, ...}``.

    Raises:
        DatasetError: not found, empty, malformed (with the line), or without the columns that SFT needs.
    """
    import datasets

    if filled.script.dataset_streaming or filled.dataset.streaming:
        raise UsageError(
            "A streamed dataset cannot be planned for: its rows are not known before they are trained on.",
            hint="Leave --dataset_streaming away.",
        )
    datasets.disable_progress_bars()
    name = dataset_name(job)
    if filled.dataset.datasets and job.dataset is None:
        from trl import get_dataset

        splits = get_dataset(filled.dataset)
    else:
        splits = _load_named(name, filled.script.dataset_config)
    _check(splits, filled, name)
    return splits


def dataset_name(job: Job) -> str:
    """What is loaded: ours, TRL's own flag, or TRL's example."""
    return str(job.dataset or job.arguments.get("dataset_name") or EXAMPLE_DATASETS[job.method])


def _load_named(name: str, config_name: str | None) -> Any:
    import datasets

    path = pathlib.Path(name)
    if path.suffix.lower() in FILE_KINDS:
        return _load_file(path)
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(name)
            return loaded if isinstance(loaded, dict) else {"train": loaded}
        return datasets.load_dataset(name, name=config_name)
    except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        kind = "folder" if path.is_dir() else "hub id"
        raise DatasetNotFoundError(
            f"Cannot load the dataset {name!r} ({kind}): {_first_line(error)}",
            hint="Give --dataset a .json, .jsonl, .parquet or .csv file, a folder, or a hub id that can be reached "
            "from here.",
        ) from error


def _load_file(path: pathlib.Path) -> Any:
    import datasets

    if not path.is_file():
        raise DatasetNotFoundError(f"No file {path}.", hint="Check the path that --dataset gives.")
    if path.stat().st_size == 0:
        raise EmptyDatasetError(f"{path} is empty.", hint="Give --dataset a file with at least one row.")
    try:
        return datasets.load_dataset(FILE_KINDS[path.suffix.lower()], data_files=str(path))
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        raise MalformedDatasetError(
            f"{path} cannot be read: {_first_bad_line(path) or _first_line(error)}",
            hint="Every line of a .jsonl file is one JSON object, with the same keys of the same types.",
        ) from error


def _first_bad_line(path: pathlib.Path) -> str:
    if path.suffix.lower() != ".jsonl":
        return ""
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                return f"line {number}, column {error.colno} is not JSON ({error.msg})"
            if not isinstance(row, dict):
                return f"line {number} is not a JSON object"
    return ""


def _first_line(error: Exception) -> str:
    return (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]


def _check(splits: Any, filled: sft.Configs, name: str) -> None:
    split = filled.script.dataset_train_split
    if split not in splits:
        raise DatasetFormatError(
            f"{name} has no split {split!r}; it has {', '.join(splits)}.", hint="Give --dataset_train_split."
        )
    train = splits[split]
    if len(train) == 0:
        raise EmptyDatasetError(f"{name} has no rows.", hint="Give --dataset a file with at least one row.")
    columns = train.column_names
    text = filled.training.dataset_text_field
    if text not in columns and not any(set(needed) <= set(columns) for needed in _FORMATS):
        raise DatasetFormatError(
            f"{name} lacks the columns that SFT needs: it has {', '.join(columns)}.",
            hint=f"SFT reads messages (conversations), prompt and completion, {text} (--dataset_text_field names "
            "another), or input_ids (already tokenized).",
        )
    evaluated = filled.training.eval_strategy != "no"
    if evaluated and filled.script.dataset_test_split not in splits:
        raise DatasetFormatError(
            f"--eval_strategy is on, but {name} has no split {filled.script.dataset_test_split!r}; it has "
            f"{', '.join(splits)}.",
            hint="Give --dataset_test_split, or --eval_strategy no.",
        )
