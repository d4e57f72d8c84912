"""Reads the table of names that flags and keys had in older TRL, transformers and accelerate, or have in other tools.

In ``old_names.csv``, ``source`` names the release that deprecated or removed the name, or the tool that has it. The
``kind`` says what ``today`` is:

- ``same``: the name of a TRL flag with the same meaning. The old name is taken.
- ``like``: names of similar flags, which a comparison of letters would not find.
- ``write``: what to write instead, which is no mere name, or why there is nothing to write.
"""

import argparse
import csv
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from autotrain_mem.support.errors import UsageError


@functools.cache
def old_names(kind: Literal["same", "like", "write"]) -> Mapping[str, str]:
    """Returns the old names of a kind, each with its ``today``."""
    with open(Path(__file__).with_name("old_names.csv"), encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file, strict=True) if row["kind"] == kind]
    return {name: row["today"] for row in rows for name in row["names"].split()}


def spellings(name: str) -> tuple[str, ...]:
    """Returns a TRL argument's name, and its old names with the same meaning."""
    return name, *(old for old, today in old_names("same").items() if today == name)


def notes(given: Iterable[str]) -> list[str]:
    """Returns a sentence for each given name that is an old name of a flag."""
    return [f"--{name} is now --{today}." for name, today in old_names("same").items() if name in given]


def old_value(value: str) -> str:
    """Returns a line on a value that a flag of another tool takes; empty for any other value."""
    return "" if (answer := old_names("write").get(value)) is None else f"\n{value}: {answer}."


def _ratio(text: str) -> float:
    """Parses a share of all steps; ``warmup_steps`` below 1 means a share (``training_args.py: get_warmup_steps``)."""
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share; --warmup_steps {text} counts steps, 0.03 is a share")
    return float(text)


_SAMPLING = {"true": "group_by_length", "false": "random"}
_READERS = {"warmup_ratio": _ratio, "group_by_length": lambda text: _SAMPLING.get(text.lower(), text)}


def add_old_names(parser: argparse.ArgumentParser, actions: Mapping[str, argparse.Action]) -> None:
    """Makes a parser accept the old names of its flags. ``actions``: the flags by name."""
    for old, today in old_names("same").items():
        if (flag := actions.get(today)) is not None:
            nargs, const = ("?", "true") if old == "group_by_length" else (flag.nargs, flag.const)
            added = parser.add_argument(
                f"--{old}", default=argparse.SUPPRESS, choices=flag.choices, nargs=nargs, const=const
            )
            added.type = _READERS.get(old, flag.type)


def by_todays_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments by today's names. Raises UsageError if an old name contradicts today's."""
    read = {name: value for name, value in given.items() if name not in old_names("same")}
    for old, new in old_names("same").items():
        if old in given and read.setdefault(new, given[old]) != given[old]:
            raise UsageError(
                f"--{old} and --{new} are an old and a new name of one setting, and contradict each other.",
                hint=f"Remove --{old}.",
            )
    return read
