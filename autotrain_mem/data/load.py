"""Loads the training data as TRL's scripts do, from a hub id, a folder or a file, and checks it."""

import contextlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from autotrain_mem.data.image_sizes import IMAGE_COLUMNS
from autotrain_mem.methods.configs import Configs
from autotrain_mem.support.errors import (
    DatasetFormatError,
    DatasetNotFoundError,
    EmptyDatasetError,
    MalformedDatasetError,
    UsageError,
)
from autotrain_mem.support.sources import DATA_KINDS, ONE_ROW, WHAT_IS_READ, check_data_path, no_split
from autotrain_mem.trainers.script_call import keyword_of, splits_of
from autotrain_mem.types.job import Job
from autotrain_mem.types.methods_table import METHODS, TEXT_COLUMN

_HOW_TO_MEND = {
    ".jsonl": "Every line of a .jsonl file is one JSON object, with the same keys of the same types.",
    ".json": "A .json file is a list of objects, or has an object on each line, with the same keys of the same types.",
    ".csv": "The first line names the columns; a value with commas, quotes or line breaks needs quotes.",
    ".parquet": "The file is truncated or is not a parquet file: write or download it again.",
}
_FILES_LISTED = 5
_NO_ROWS = "corresponds to no data"
"""Part of datasets' ValueError for a file without rows (datasets/arrow_reader.py)."""


def load(job: Job, filled: Configs) -> Any:
    """Returns the dataset's splits, as ``{"train": Dataset, ...}``. Raises DatasetError if not found, empty, malformed
    (with the line), or in a format that the method does not read, and UsageError if the dataset is streamed."""
    import datasets
    from trl import get_dataset

    datasets.disable_progress_bars()
    if job.python_call is not None:
        splits: Any = splits_of(job, filled.script.dataset_train_split)
    elif filled.script.dataset_streaming or filled.dataset.streaming:
        raise UsageError(
            "A streamed dataset cannot be planned for, since its rows cannot be counted in advance.",
            hint="Remove --dataset_streaming.",
        )
    elif filled.dataset.datasets and job.dataset is None:
        splits = get_dataset(filled.dataset)
    else:
        splits = load_named(dataset_name(job), filled.script.dataset_config)
    name, split, test = dataset_name(job), filled.script.dataset_train_split, filled.script.dataset_test_split
    if split not in splits:
        raise no_split(name, "train", split, splits)
    evaluated = evaluated_splits(job, filled, splits)
    if job.is_evaluated and not any(used in splits for used in evaluated):
        if job.python_call is not None:
            raise DatasetFormatError(
                "eval_strategy asks for evaluation, but the trainer is given no eval_dataset.",
                hint='Give eval_dataset=, or the config eval_strategy="no".',
            )
        raise no_split(name, "test", test, splits)
    for used in (split, *evaluated):
        name, columns = rows_name(job, filled, used), splits[used].column_names
        if len(splits[used]) == 0:
            raise EmptyDatasetError(f"{name} has no rows.", hint=ONE_ROW)
        _check_images(columns, job, name)
        if not columns_read(job.method, columns, filled) and keyword_of(job, "formatting_func") is None:
            trainer, held = job.method_facts.trainer, format_name(columns)
            raise DatasetFormatError(
                f"{name} holds {held} (columns {', '.join(columns)}), and {trainer} cannot train on that.",
                hint=f"{trainer} reads {formats_wanted(job.method, filled)}. Rename the columns, or make them from "
                "yours.",
            )
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


def load_named(name: str, config_name: str | None) -> Any:
    """Loads a file, a folder or a hub id, and returns its splits. Raises as :func:`load` does."""
    import datasets

    path = pathlib.Path(name)
    check_data_path(name)
    suffix = path.suffix.lower()
    if path.is_file():
        try:
            return datasets.load_dataset(DATA_KINDS[suffix], data_files=str(path))
        except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
            if _NO_ROWS in str(error):
                raise EmptyDatasetError(f"{path} has no rows.", hint=ONE_ROW) from error
            reason = _unreadable(path) or _first_line(error)
            raise MalformedDatasetError(f"{path} cannot be read: {reason}.", hint=_HOW_TO_MEND[suffix]) from error
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(name)
            return loaded if isinstance(loaded, dict) else {"train": loaded}
        return datasets.load_dataset(name, name=config_name)
    except datasets.exceptions.DatasetGenerationError as error:
        if path.is_dir() and isinstance(error.__cause__, datasets.table.CastError):
            # A folder is read as one table (``datasets/table.py: table_cast``).
            files = [str(file) for file in sorted(path.rglob("*")) if file.suffix.lower() in DATA_KINDS]
            listed = "\n".join(f"  --dataset {file}" for file in files[:_FILES_LISTED])
            more = f"\n  and {len(files) - _FILES_LISTED} more" if len(files) > _FILES_LISTED else ""
            raise MalformedDatasetError(
                f"The files in {path} do not have the same columns, and a folder is read as one table.",
                hint=f"Give one file, or put files of the same columns in a folder of their own:\n{listed}{more}",
            ) from error
        for file in sorted(path.rglob("*.json*")):  # none for a hub id
            if where := _unreadable(file):
                message = f"{file} cannot be read: {where}."
                raise MalformedDatasetError(message, hint=_HOW_TO_MEND[file.suffix.lower()]) from error
        raise MalformedDatasetError(
            f"{name} cannot be read: {_first_line(error)}.", hint="Give --dataset one of its files to find the line."
        ) from error
    except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        if _NO_ROWS in str(error):
            raise EmptyDatasetError(f"{name} has no rows.", hint=ONE_ROW) from error
        kind = "folder" if path.is_dir() else "hub id"
        raise DatasetNotFoundError(
            f"Cannot load the dataset {name!r} ({kind}): {_first_line(error)}.", hint=WHAT_IS_READ
        ) from error


def _unreadable(path: pathlib.Path) -> str:
    """Returns the line of a file that cannot be read, and the reason; empty if unknown."""
    if where := undecodable_line(path):
        return f"{where} is not UTF-8"
    suffix = path.suffix.lower()
    if suffix not in (".json", ".jsonl"):
        return ""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        is_of_lines = suffix == ".jsonl"
        with contextlib.suppress(json.JSONDecodeError):
            is_of_lines = is_of_lines or isinstance(json.loads(file.readline()), dict)
        file.seek(0)
        for number, text in enumerate(file if is_of_lines else [file.read()], 1):
            text = text.rstrip()  # so a truncated row ends here, not at the start of the next line
            if is_of_lines and not text:
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                line = number if is_of_lines else error.lineno
                return f"line {line}, column {error.colno} is not JSON ({error.msg})"
            if is_of_lines and not isinstance(row, dict):
                return f"line {number} is not a JSON object"
    return ""


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
        raise DatasetFormatError(
            f"{name} holds images ({', '.join(seen)}), but images are rehearsed only with the model's own processor, "
            f"not with {' and '.join(own)}.",
            hint="Give model= by its name and remove the other objects; AutoFit(max_pixels=N) makes images smaller. To "
            f"train on the text alone, remove the column: {name} = {name}.remove_columns({seen}).",
        )


_KINDS = {
    ("prompt", "chosen", "rejected"): "preferences",
    ("chosen", "rejected"): "preferences without a prompt",
    ("chosen_ids", "rejected_ids"): "tokenized preferences",
    ("prompt", "completion", "label"): "unpaired preferences",
    ("input_ids",): "tokenized rows",
    ("prompt", "completion"): "prompts with completions",
    ("messages",): "conversations",
    ("conversations",): "conversations",
    ("prompt",): "prompts",
    ("text",): "plain text",
}
"""Columns, the most specific first -> the kind of rows, as in TRL's documentation."""


def columns_read(method: str, columns: Sequence[str], filled: Configs) -> tuple[str, ...]:
    """Returns the columns that the method trains on; empty if none of its formats matches."""
    found = [needed for needed in _formats(method, filled) if set(needed) <= set(columns)]
    return found[0] if found else ()


def format_name(columns: Sequence[str]) -> str:
    """Returns the format of a dataset with these columns, such as ``plain text``."""
    return next((kind for needed, kind in _KINDS.items() if set(needed) <= set(columns)), "no format that TRL knows")


def formats_wanted(method: str, filled: Configs) -> str:
    """Returns the formats that the method reads: ``prompts (prompt) or tokenized rows (input_ids)``."""
    columns: dict[str, list[str]] = {}
    for needed in _formats(method, filled):
        columns.setdefault(_KINDS.get(needed, "plain text"), []).append(", ".join(needed))
    *first, last = [f"{kind} ({' or '.join(sets)})" for kind, sets in columns.items()]
    text = " (--dataset_text_field names another column of text)" if (TEXT_COLUMN,) in METHODS[method].formats else ""
    return (f"{', '.join(first)} or {last}" if first else last) + text


def _formats(method: str, filled: Configs) -> list[tuple[str, ...]]:
    """Returns the method's formats, with the text column that the user names."""
    formats = METHODS[method].formats
    return [(filled.training.dataset_text_field,) if each == (TEXT_COLUMN,) else each for each in formats]


_GOOD_VALUES = """\
Drop or fix these rows. Text is a string. A conversation is a list of at least one message:
{"role": "user", "content": "..."} in a column messages (rename conversations to messages), or
{"from": "human", "value": "..."} in either. Only a message with tool_calls has no content. The prompt and the
answers of a row are all strings, or all conversations. Tokenized rows are lists of at least one whole number, labels
are true or false."""
_SHOWN_CHARACTERS = 40


def check_rows(split: Any, columns: tuple[str, ...], name: str) -> None:
    """Checks every row of a datasets.Dataset. ``columns``: the columns that the method reads: see :func:`columns_read`.
    ``name``: the file, folder or hub id, for the message. Raises DatasetFormatError for values of the wrong kind,
    naming the first row and counting the others, and MalformedDatasetError for text that is not UTF-8."""
    kept = split.select_columns(list(columns)).with_format(None)
    try:
        bad = [number for number, row in enumerate(kept) if not _is_good(row)]
    except UnicodeDecodeError as error:
        raise MalformedDatasetError(
            f"{name} holds text that is not UTF-8: {undecodable_line(pathlib.Path(name)) or error}.",
            hint="Save the file as UTF-8.",
        ) from error
    if bad:
        row = bad[0]
        first = {column: kept[row][column] for column in columns}
        others = f", and {len(bad) - 1} more such row{'s' if len(bad) > 2 else ''}" if len(bad) > 1 else ""
        values = ", ".join(f"{column} is {_shown(value)}" for column, value in first.items())
        place = f"row {row + 1}"
        if name.lower().endswith(".jsonl"):  # blank lines count, and hold no row
            with open(name, "rb") as lines:
                filled = (number for number, line in enumerate(lines, 1) if line.strip())
                place = next((f"line {number}" for at, number in enumerate(filled) if at == row), place)
        raise DatasetFormatError(f"{name} cannot be trained on: in {place}, {values}{others}.", hint=_GOOD_VALUES)


def undecodable_line(path: pathlib.Path) -> str:
    """Returns the first line that is not UTF-8, as ``line 3``, or an empty text."""
    if path.suffix.lower() not in (".json", ".jsonl", ".csv"):
        return ""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return f"line {number}"
    return ""


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _is_conversation(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) and _is_message(message) for message in value)


def _is_message(message: Mapping[str, Any]) -> bool:
    said = message.get("value" if message.get("from") else "content")
    is_said = isinstance(said, (str, list)) or bool(message.get("tool_calls"))
    return is_said and isinstance(message.get("role") or message.get("from"), str)


_ALIKE = ("prompt", "completion", "chosen", "rejected")
_CONVERSATIONS = ("messages", "conversations")
_LABEL = "label"


def _is_good(row: Mapping[str, Any]) -> bool:
    """Returns whether every column holds the kind of value that its name requires."""
    alike = []
    for column, value in row.items():
        if column in _ALIKE:
            alike.append(value)
            continue
        if column.endswith("_ids"):
            is_good = isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
        elif column in _CONVERSATIONS:
            # TRL renames the column only if messages have "from" (trl/data_utils.py: is_conversational_from_value).
            is_good = _is_conversation(value) and (column == "messages" or "from" in value[0])
        else:
            is_good = value in (True, False) if column == _LABEL else isinstance(value, str)
        if not is_good:
            return False
    return all(isinstance(value, str) for value in alike) or all(map(_is_conversation, alike))
