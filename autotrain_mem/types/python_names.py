"""Adds a note to an error: the Python spelling of the flags in its message."""

import enum
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from autotrain_mem.settings.knobs import BASE_BITS
from autotrain_mem.support.errors import AutofitError, RehearsalError, TrainingError
from autotrain_mem.types.autofit import SETTINGS, in_python

_FLAG = re.compile(r"(?<![\w-])--([a-z][\w-]*)")
_OURS = {name: in_python(name) for name in SETTINGS}
_OF_VERBS = {"plan_only": "plan(...)", "simulate": "fit(..., simulate=True)", "out": "plan(...).save(path)"}
"""The flags that not every Python verb takes as ``NAME=...``, and what to write in their place."""
_OF_TRAINERS = {
    "use_peft": "peft_config=LoraConfig(...)",
    "lora_target_modules": "LoraConfig(target_modules=...)",
    **{name: f"quantization_config=BitsAndBytesConfig({name}=True)" for name in BASE_BITS},
    "dtype": 'model_init_kwargs={"dtype": ...}',
    "attn_implementation": 'model_init_kwargs={"attn_implementation": ...}',
    "model": "the first argument",
    "dataset": "train_dataset=...",
    "reward_funcs": "reward_funcs=...",
    "reward_model_path": "reward_model=...",
    "teacher_model_name_or_path": "teacher_model=...",
    "out": "trainer.plan.save(path)",
    "plan_only": "plan(...)",
}
"""The flags that are not fields of a trainer's config, and what to write in their place."""
_OF_THE_COMMAND = frozenset({"config", "debug", "help", "json", "recipe", "snapshot"})
"""The flags without a counterpart in Python."""


@dataclass
class PythonErrors(AbstractContextManager[object]):
    """Adds a note to each error that leaves the block, with the Python spelling of its flags, and shortens tracebacks.

    Removes this package's frames from the traceback, since the message tells what to do, and the worker's traceback,
    except for errors that the installed libraries raised in a rehearsal or in training. ``config``: the name of a
    trainer's config class, such as ``SFTConfig``; empty for the verbs, which take keywords.
    """

    config: str = ""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, AutofitError | KeyboardInterrupt):
            return
        error.__traceback__ = None  # the interpreter adds the callers' frames
        if not isinstance(error, RehearsalError | TrainingError):
            error.__cause__ = None  # setting it also hides the error's context (PEP 415)
        if isinstance(error, AutofitError) and (note := python_words(f"{error.message}\n{error.hint}", self.config)):
            error.add_note(note)


def python_words(text: str, config: str = "") -> str:
    """Returns a sentence with the Python spelling of the flags in a text; empty if the text has none.

    Example: ``Give --max-length 512, or --gpu l4.`` gives ``In Python --max_length is max_length=..., --gpu is
    AutoFit(gpu=...)``.
    """
    names = dict.fromkeys(flag.replace("-", "_") for flag in _FLAG.findall(text))
    known = _OURS | (_OF_TRAINERS if config else _OF_VERBS)
    words = {name: known.get(name) or (f"{config}({name}=...)" if config else f"{name}=...") for name in names}
    phrases = [f"--{name} is {word}" for name, word in words.items() if name not in _OF_THE_COMMAND]
    return f"In Python {', '.join(phrases)}" if phrases else ""


def as_json(value: Any, other: Callable[[Any], Any]) -> Any:
    """Converts a value to JSON: an enumeration to its value, a path to text, a dtype to its name, a set to a list.
    ``other``: converts an object of any other type, or raises."""
    match value:
        case enum.Enum():
            return as_json(value.value, other)
        case None | bool() | int() | float() | str():
            return value
        case os.PathLike():
            return os.fsdecode(value)
        case Mapping():
            return {str(name): as_json(each, other) for name, each in value.items()}
        case set() | frozenset():
            return sorted((as_json(each, other) for each in value), key=str)
        case list() | tuple():
            return [as_json(each, other) for each in value]
    is_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    return str(value).removeprefix("torch.") if is_dtype else other(value)
