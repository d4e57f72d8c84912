"""Loads the training data as TRL's scripts do, from a hub id, a folder or a file, and checks it."""

import pathlib
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from autotrain_mem.data.image_sizes import IMAGE_COLUMNS
from autotrain_mem.methods import row_formats
from autotrain_mem.methods.configs import Configs
from autotrain_mem.support import data_files, errors
from autotrain_mem.support.sources import ONE_ROW, WHAT_IS_READ, check_data_path, no_split
from autotrain_mem.trainers.script_call import keyword_of, splits_of
from autotrain_mem.types import TEXT_COLUMN, Job

_FILES_LISTED = 5
_NO_ROWS = "corresponds to no data"
"""Part of datasets' ValueError for a file without rows (datasets/arrow_reader.py)."""


def load(job: Job, filled: Configs) -> Any:
    """Returns the dataset's splits, as ``{"train": Dataset, ...}``. Raises DatasetError if not found, empty, malformed
    (with the line), or in a format that the method does not read. A stream's rows are not looked at."""
    import datasets
    from trl import get_dataset

    datasets.disable_progress_bars()
    if job.python_call is not None:
        splits: Any = splits_of(job, filled.script.dataset_train_split)
    elif filled.dataset.datasets and job.dataset is None:
        splits = get_dataset(filled.dataset)
    else:
        splits = load_named(dataset_name(job), filled.script.dataset_config, streaming=job.streams)
    name, split, test = dataset_name(job), filled.script.dataset_train_split, filled.script.dataset_test_split
    if split not in splits:
        raise no_split(name, "train", split, splits)
    evaluated = evaluated_splits(job, filled, splits)
    if job.is_evaluated and not any(used in splits for used in evaluated):
        if job.python_call is not None:
            raise errors.DatasetFormatError(
                "eval_strategy asks for evaluation, but the trainer is given no eval_dataset.",
                hint='Give eval_dataset=, or the config eval_strategy="no".',
            )
        raise no_split(name, "test", test, splits)
    for used in (split, *evaluated):
        name, columns = rows_name(job, filled, used), splits[used].column_names
        if columns is None:  # of a stream that was not read
            continue
        if not job.streams and len(splits[used]) == 0:
            raise errors.EmptyDatasetError(f"{name} has no rows.", hint=ONE_ROW)
        _check_images(columns, job, name)
        if not columns_of(job, filled, columns) and keyword_of(job, "formatting_func") is None:
            text_column = getattr(filled.training, "dataset_text_field", TEXT_COLUMN)
            raise row_formats.wrong_format(job.method, columns, name, text_column)
    return splits


def dataset_name(job: Job) -> str:
    """Returns the dataset's name: our flag, TRL's flag or TRL's example; for a script's own rows ``train_dataset``."""
    if job.python_call is not None:
        return "train_dataset"
    return str(job.dataset or job.arguments.get("dataset_name") or job.method_facts.example_dataset)


def evaluated_splits(job: Job, filled: Configs, splits: Mapping[str, Any]) -> list[str]:
    """Returns the splits that the job evaluates on; of a script's own rows, all but the training split."""
    if not job.is_evaluated:
        return []
    if job.python_call is None:
        return [filled.script.dataset_test_split]
    return [name for name in splits if name != filled.script.dataset_train_split]


def rows_name(job: Job, filled: Configs, split: str) -> str:
    """Returns a split's name for messages: ``rows.jsonl``; in scripts ``train_dataset``, ``eval_dataset['a']``."""
    return dataset_name(job) if job.python_call is None or split == filled.script.dataset_train_split else split


def load_named(name: str, config_name: str | None, *, streaming: bool = False) -> Any:
    """Loads a file, a folder or a hub id, and returns its splits, or their streams. Raises as :func:`load` does."""
    import datasets

    path = pathlib.Path(name)
    check_data_path(name)
    if path.is_file():
        kind = data_files.DATA_KINDS[data_files.suffix_of(path)]
        try:
            return datasets.load_dataset(kind, data_files=str(path), streaming=streaming)
        except (OSError, ValueError, RecursionError, datasets.exceptions.DatasetGenerationError) as error:
            if _NO_ROWS in str(error):
                raise errors.EmptyDatasetError(f"{path} has no rows.", hint=ONE_ROW) from error
            reason = data_files.why_unreadable(path) or _first_line(error)
            raise errors.MalformedDatasetError(
                f"{path} cannot be read: {reason}.", hint=data_files.HOW_TO_MEND[kind]
            ) from error
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(name)
            return loaded if isinstance(loaded, dict) else {"train": loaded}
        return datasets.load_dataset(name, name=config_name, streaming=streaming)
    except datasets.exceptions.DatasetGenerationError as error:
        if path.is_dir() and isinstance(error.__cause__, datasets.table.CastError):
            # A folder is read as one table (``datasets/table.py: table_cast``).
            files = [
                str(file) for file in sorted(path.rglob("*")) if data_files.suffix_of(file) in data_files.DATA_KINDS
            ]
            listed = "\n".join(f"  --dataset {file}" for file in files[:_FILES_LISTED])
            more = f"\n  and {len(files) - _FILES_LISTED} more" if len(files) > _FILES_LISTED else ""
            raise errors.MalformedDatasetError(
                f"The files in {path} do not have the same columns, and a folder is read as one table.",
                hint=f"Give one file, or put files of the same columns in a folder of their own:\n{listed}{more}",
            ) from error
        for file in sorted(path.rglob("*.json*")):  # none for a hub id
            if where := data_files.why_unreadable(file):
                message = f"{file} cannot be read: {where}."
                raise errors.MalformedDatasetError(message, hint=data_files.HOW_TO_MEND["json"]) from error
        raise errors.MalformedDatasetError(
            f"{name} cannot be read: {_first_line(error)}.", hint="Give --dataset one of its files to find the line."
        ) from error
    except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        if _NO_ROWS in str(error):
            raise errors.EmptyDatasetError(f"{name} has no rows.", hint=ONE_ROW) from error
        kind = "folder" if path.is_dir() else "hub id"
        raise errors.DatasetNotFoundError(
            f"Cannot load the dataset {name!r} ({kind}): {_first_line(error)}.", hint=WHAT_IS_READ
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error.__cause__ or error) or type(error).__name__).splitlines()[0].rstrip(".")


def _check_images(columns: Sequence[str], job: Job, name: str) -> None:
    """Rejects images that a script's own objects turn into tensors."""
    seen, call = sorted({*IMAGE_COLUMNS}.intersection(columns)), job.python_call
    if not seen or call is None or not job.method_facts.reads_images:
        return
    own = [each for each in ("processing_class", "data_collator", "formatting_func") if keyword_of(job, each)]
    own += ["a model object"] if call.holds_model else []
    if own:
        raise errors.DatasetFormatError(
            f"{name} holds images ({', '.join(seen)}), but images are rehearsed only with the model's own processor, "
            f"not with {' and '.join(own)}.",
            hint="Give model= by its name and remove the other objects; AutoFit(max_pixels=N) makes images smaller. To "
            f"train on the text alone, remove the column: {name} = {name}.remove_columns({seen}).",
        )


def columns_of(job: Job, filled: Configs, columns: Sequence[str]) -> tuple[str, ...]:
    """Returns those of a dataset's columns that the job trains on; empty if none of its formats matches."""
    return row_formats.columns_read(job.method, columns, getattr(filled.training, "dataset_text_field", TEXT_COLUMN))


def check_rows(split: Any, columns: tuple[str, ...], name: str, template: str | None) -> int:
    """Checks every row of a datasets.Dataset. ``columns``: the columns that the method reads: see :func:`columns_read`.
    ``name``: the file, folder or hub id, for the message. ``template``: the chat template; None if unknown.
    Returns the number of rows without a text or an answer. Raises DatasetFormatError for values of the wrong kind,
    naming the first row and counting the others, and MalformedDatasetError for text that is not UTF-8."""
    kept = split.select_columns(list(columns)).with_format(None)
    try:
        empty, bad = 0, {}
        take_texts = not row_formats.why_bad(dict.fromkeys(columns, "a text"))
        for first, batch in zip(count(step=1000), kept.iter(1000), strict=False):
            if take_texts and all(isinstance(value, str) and value for values in batch.values() for value in values):
                continue  # a tenth of the time
            for number, values in enumerate(zip(*(batch[column] for column in columns), strict=True), first):
                row = dict(zip(columns, values, strict=True))
                empty += row_formats.is_empty(row)
                if why := row_formats.why_bad(row, template):
                    bad[number] = why
    except UnicodeDecodeError as error:
        raise errors.MalformedDatasetError(
            f"{name} holds text that is not UTF-8: {data_files.undecodable_line(pathlib.Path(name)) or error}.",
            hint="Save the file as UTF-8.",
        ) from error
    if bad:
        raise row_formats.bad_rows(name, bad)
    return empty
