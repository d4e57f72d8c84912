"""Writes a script's call of a trainer to a file. A rehearsal reads the file and repeats the call.

In the repeated call, the drop-in classes apply :data:`substitution` before they call TRL.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Self

from autotrain_mem.support.errors import RehearsalError, UsageError, described
from autotrain_mem.support.files import writing
from autotrain_mem.types import Job

Keywords = dict[str, Any]
"""The arguments of a TRL trainer's constructor, by name."""
substitution: ContextVar[Callable[[Keywords], Keywords] | None] = ContextVar("substitution", default=None)
"""The function that replaces model, rows and callbacks by those of a rehearsal; None outside a rehearsal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    trainer: type
    """The called class: a drop-in trainer, or a subclass that the user wrote."""
    args: tuple[Any, ...]
    """The positional arguments of the call, as in the script."""
    kwargs: Mapping[str, Any]
    keywords: Mapping[str, Any]
    """The arguments that reach TRL's constructor, by name."""

    @property
    def model(self) -> Any:
        """Returns the model's name, or the model object."""
        return self.keywords["model"]

    def replacing(self, old: Any, new: Any) -> Self:
        """Returns a copy of the call in which each argument that is ``old`` becomes ``new``."""

        def other(value: Any) -> Any:
            return new if value is old else value

        return replace(
            self,
            args=tuple(map(other, self.args)),
            kwargs={name: other(value) for name, value in self.kwargs.items()},
            keywords={name: other(value) for name, value in self.keywords.items()},
        )


def write(call: Call, folder: pathlib.Path) -> str:
    """Writes a call without the values of its tensors. Returns the file's path. Raises UsageError if the call has no
    tokenizer, or holds an object that cannot leave its process, and OutputFolderError if the file cannot be written."""
    from autotrain_mem.trainers import pickle_without_tensors  # torch takes seconds to import

    # TRL would look for the tokenizer of a model without a name in an empty repository (``sft_trainer.py: __init__``).
    config = getattr(call.model, "config", None)
    is_named = isinstance(call.model, str) or bool(getattr(config, "_name_or_path", ""))
    if not is_named and call.keywords.get("processing_class") is None:
        kind = type(call.model).__name__
        raise UsageError(
            f"There is no tokenizer for this {kind}: it was not loaded by a name, and processing_class is not given.",
            hint="Give the trainer the model's tokenizer: processing_class=AutoTokenizer.from_pretrained(...).",
        )
    path, content = folder / "call", pickle_without_tensors.pack(call, call.keywords)
    with writing(path, "the environment variable TMPDIR a folder"):
        path.write_bytes(content)
    return str(path)


def read(job: Job) -> Call:
    """Reads the call of a script's job. Each result is a new object, with models on the meta device or fake. Raises
    RehearsalError if a part of the call cannot be rebuilt in this process."""
    from autotrain_mem.trainers import pickle_without_tensors

    assert job.python_call is not None, "only a script's job has a call"
    try:
        call = pickle_without_tensors.unpack(_content(job.python_call.path))
    except Exception as error:  # the user's classes may raise anything when they are imported or rebuilt
        raise RehearsalError(
            f"The trainer's arguments cannot be rebuilt in the rehearsal's process: {described(error)}",
            hint="Move its classes and functions into a module that can be imported from the script's folder.",
        ) from error
    assert isinstance(call, Call)
    return call


@functools.lru_cache(maxsize=1)
def _content(path: str) -> bytes:
    return pathlib.Path(path).read_bytes()


EVALUATED = "eval_dataset"


def splits_of(job: Job, train_split: str) -> dict[str, Any]:
    """Returns the script's datasets: training rows by their split's name, evaluation rows by the script's expression.

    Example: ``{"train": ..., "eval_dataset['chat']": ..., "eval_dataset['code']": ...}``. Their columns can differ.
    """
    keywords = read(job).keywords
    evaluated = keywords.get(EVALUATED)
    splits = {train_split: keywords.get("train_dataset")}
    if isinstance(evaluated, Mapping):
        splits |= {f"{EVALUATED}[{name!r}]": rows for name, rows in evaluated.items()}
    else:
        splits[EVALUATED] = evaluated
    return {name: rows for name, rows in splits.items() if rows is not None}


def keyword_of(job: Job, name: str) -> Any:
    """Returns the script's argument of this name for TRL's constructor; None if it is missing or there is no script."""
    return None if job.python_call is None else read(job).keywords.get(name)


def model_of(job: Job) -> Any:
    """Returns the script's model object, on the meta device or fake; None if the model is given by name."""
    return read(job).model if job.python_call is not None and job.python_call.holds_model else None


def quantization_of(keywords: Mapping[str, Any]) -> Any:
    """Returns the quantization config in a script's call, from either place where TRL accepts it; None without one."""
    said = getattr(keywords.get("args"), "model_init_kwargs", None) or {}
    return keywords.get("quantization_config") or said.get("quantization_config")


def is_adapted(model: Any) -> bool:
    """Returns whether a model object already has an adapter."""
    return getattr(model, "peft_config", None) is not None


def loading(said: Mapping[str, Any] | None, dtype: str) -> Mapping[str, Any] | None:
    """Returns ``model_init_kwargs`` with the plan's dtype. Without a dtype, TRL loads in float32."""
    asked = str((said or {}).get("dtype") or "float32").removeprefix("torch.")
    return said if asked == dtype else {**(said or {}), "dtype": dtype}
