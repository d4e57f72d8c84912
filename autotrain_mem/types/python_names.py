"""Adds to errors how Python spells the flags of their cures."""

import enum
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from autotrain_mem.settings.knobs import BASE_BITS
from autotrain_mem.support.errors import AutofitError, RehearsalError, TrainingError
from autotrain_mem.types.autofit import SETTINGS, in_python

_FLAG = re.compile(r"(?<![\w-])--([a-z][\w-]*)")
_OURS = {name: in_python(name) for name in SETTINGS}
_OF_VERBS = {"plan_only": "plan(...)", "simulate": "fit(..., simulate=True)", "out": "plan(...).save(path)"}
"""Flags that are not keywords of a verb."""
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
"""Flags that are not fields of a trainer's config."""
_OF_THE_COMMAND = frozenset({"config", "debug", "help", "json", "recipe", "snapshot"})
"""Flags without a counterpart in Python."""


@contextmanager
def python_errors(config: str = "") -> Iterator[None]:
    """Adds a note to errors that leave the block, with the Python spelling of their flags.

    Hides the worker's traceback, except for errors that the installed libraries raised in a rehearsal or in training.
    ``config``: the class of a trainer's config, such as ``SFTConfig``; empty for the verbs, which take keywords.
    """
    try:
        yield
    except AutofitError as error:
        if not isinstance(error, RehearsalError | TrainingError):
            error.__cause__ = None  # and with it what was raised before it (PEP 415)
        if note := python_words(f"{error.message}\n{error.hint}", config):
            error.add_note(note)
        raise


def python_words(text: str, config: str = "") -> str:
    """Describes the Python spelling of the flags in a text; empty if it has none.

    Example: for ``Give --max-length 512, or --gpu l4.`` it is ``In Python --max_length is max_length=..., --gpu is
    AutoFit(gpu=...)``.
    """
    names = dict.fromkeys(flag.replace("-", "_") for flag in _FLAG.findall(text))
    known = _OURS | (_OF_TRAINERS if config else _OF_VERBS)
    words = {name: known.get(name) or (f"{config}({name}=...)" if config else f"{name}=...") for name in names}
    phrases = [f"--{name} is {word}" for name, word in words.items() if name not in _OF_THE_COMMAND]
    return f"In Python {', '.join(phrases)}" if phrases else ""


def as_json(value: Any, other: Callable[[Any], Any]) -> Any:
    """Returns a value's JSON: an enumeration's value, a path's text, a dtype's name; a set becomes a sorted list.
    ``other``: converts an object of any other kind, or raises."""
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
