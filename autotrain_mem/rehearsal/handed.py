"""A trainer's call from the user's own Python, written to a file by their process and repeated in a rehearsal.

The trainer's class is called again, with the very arguments of the script, the user's own subclass and its constructor
included. Where that call reaches TRL's constructor, :data:`substitution` puts in what a rehearsal has in the place of
weights, rows and callbacks: the drop-in classes (``autotrain_mem.drop_in``) ask it before they call TRL.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from autotrain_mem.errors import RehearsalError
from autotrain_mem.rehearsal import skeleton
from autotrain_mem.rehearsal.configs import Configs
from autotrain_mem.spec import Job

Keywords = dict[str, Any]
"""Arguments of a TRL trainer's constructor, by name."""

substitution: ContextVar[Callable[[Keywords], Keywords] | None] = ContextVar("substitution", default=None)
"""What a rehearsal makes of the arguments of TRL's constructor; None outside one."""

_FILE = "call"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """How a script calls a trainer's class."""

    trainer: type
    """The class that is called: a drop-in one, or the user's own on top of it."""
    args: tuple[Any, ...]
    """Of the call, as the script wrote it."""
    kwargs: Mapping[str, Any]
    keywords: Mapping[str, Any]
    """What of it reaches TRL's constructor, by its names."""

    @property
    def model(self) -> Any:
        """A name, or an object."""
        return self.keywords["model"]

    def replacing(self, old: Any, new: Any) -> Call:
        """The same call with another value wherever this one stands."""

        def other(value: Any) -> Any:
            return new if value is old else value

        return replace(
            self,
            args=tuple(map(other, self.args)),
            kwargs={name: other(value) for name, value in self.kwargs.items()},
            keywords={name: other(value) for name, value in self.keywords.items()},
        )


def write(call: Call, folder: pathlib.Path) -> str:
    """Write a call without the bytes of its tensors; returns the file's path."""
    path = folder / _FILE
    path.write_bytes(skeleton.pack(call))
    return str(path)


def read(job: Job) -> Call:
    """The call of a job from Python: a new one each time, with models on the meta device.

    Raises:
        RehearsalError: something in it cannot be made again in another process.
    """
    assert job.handed is not None, "asked for jobs from Python only"
    try:
        call = skeleton.unpack(_content(job.handed.path))
    except Exception as error:  # whatever the user's classes raise when they are imported or rebuilt
        raise RehearsalError(
            f"What the script hands to the trainer cannot be rebuilt in the rehearsal's process: "
            f"{type(error).__name__}: {error}",
            hint="Classes and functions in a module of their own, importable from the script's folder, always can.",
        ) from error
    assert isinstance(call, Call)
    return call


@functools.lru_cache(maxsize=1)
def _content(path: str) -> bytes:
    return pathlib.Path(path).read_bytes()


def splits_of(job: Job, filled: Configs) -> dict[str, Any]:
    """The rows handed over, by the names of their splits; formatted, where the script hands a function for that.

    Evaluation data of several parts become one: the longest row of any of them counts.
    """
    keywords = read(job).keywords
    splits = {filled.script.dataset_train_split: keywords.get("train_dataset")}
    if (evaluated := keywords.get("eval_dataset")) is not None:
        splits[filled.script.dataset_test_split] = _joined(evaluated)
    formatting = keywords.get("formatting_func")
    return {name: _formatted(rows, formatting) for name, rows in splits.items() if rows is not None}


def _joined(rows: Any) -> Any:
    if not isinstance(rows, Mapping):
        return rows
    from datasets import concatenate_datasets

    return concatenate_datasets(list(rows.values()))


def _formatted(rows: Any, formatting: Callable[[Any], str] | None) -> Any:
    """As ``trl/trainer/sft_trainer.py: _prepare_dataset`` does: the text that a row becomes, unless it has tokens."""
    if formatting is None or "input_ids" in rows.column_names:
        return rows
    kept = [name for name in rows.column_names if name != "text"]
    return rows.map(lambda row: {"text": formatting(row)}, remove_columns=kept, keep_in_memory=True)


def tokenizer_of(job: Job) -> Any:
    """The tokenizer that a script hands over; None where the model's own is taken."""
    return None if job.handed is None else read(job).keywords.get("processing_class")


def model_of(job: Job) -> Any:
    """The model object that a script hands over, on the meta device; None where it is a name."""
    return read(job).model if job.handed is not None and job.handed.holds_model else None
