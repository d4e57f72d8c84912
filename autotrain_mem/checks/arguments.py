"""The user's flags and YAML keys, read by TRL's own parser, which also says what was given and what was not."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from autotrain_mem.checks import table
from autotrain_mem.checks.flag_checks import Flags
from autotrain_mem.methods.interface import method_of
from autotrain_mem.settings.trl_parser import TrlFlags, actions_of, flags_of, read_given
from autotrain_mem.settings.words import MOST, SAME_ARGUMENT
from autotrain_mem.support.errors import MissingExtraError
from autotrain_mem.types import Knobs
from autotrain_mem.types.findings import refuse
from autotrain_mem.types.methods_table import METHODS


def parse(
    method: str,
    argv: tuple[str, ...],
    config: Mapping[str, Any],
    also_known: tuple[str, ...],
    pins: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], Knobs]:
    """Parses the flags that are not ours, over the keys of a YAML config.

    Returns exactly the arguments that the user gave, under TRL's names, and TRL's own values for what a plan decides.

    Args:
        argv: Flags without our own.
        config: Top-level keys of the YAML file without our own; a flag wins over its key.
        also_known: Our own names, for did-you-mean.
        pins: Knobs that are ours alone and that the user gave.
        own: Our other flags that the user gave, which may contradict TRL's.

    Raises:
        UsageError: an unknown flag or key (with the nearest), a value that TRL refuses; all that contradicts itself
            or cannot be rehearsed, at once.
    """
    parser = method_of(method).make_parser()
    defaults = {name: action.default for name, action in actions_of(parser).items()}
    read = read_given(parser, method, argv, config, also_known, _methods_with)
    given = {SAME_ARGUMENT.get(name, name): value for name, value in read.items()}
    given |= pins or {}
    numbers = {name: value for name, value in given.items() if value != MOST}
    flags = Flags(method=method, given=numbers, own=own or {})
    refuse(table.FLAGS, flags)
    refuse(table.TRL_ARGUMENTS, flags)
    return given, _knobs(defaults)


def accept(method: str, given: Mapping[str, Any], own: Mapping[str, Any]) -> Knobs:
    """TRL's own values for what a plan decides, for a config that a script made, and TRL has accepted already. Raises
    UsageError for all that contradicts itself or cannot be rehearsed, at once."""
    refuse(table.FLAGS, Flags(method=method, given=given, own=own))
    return _knobs({name: action.default for name, action in actions_of(method_of(method).make_parser()).items()})


def _knobs(defaults: Mapping[str, Any]) -> Knobs:
    return Knobs(**{field.name: defaults[field.name] for field in fields(Knobs) if field.name in defaults})


def flag_tables() -> dict[str, TrlFlags]:
    """Writes down the flags and the help of every method that the installed TRL has."""
    tables = {}
    for method in METHODS:
        with contextlib.suppress(MissingExtraError):
            parser = method_of(method).make_parser()
            tables[method] = TrlFlags(flags=flags_of(parser), help=parser.format_help())
    return tables


def _methods_with(name: str) -> list[str]:
    """Returns the methods whose parser knows the name. Slow, and called only before a command fails."""
    found = []
    for method in METHODS:
        with contextlib.suppress(MissingExtraError):
            if any(action.dest == name for action in method_of(method).make_parser()._actions):
                found.append(method)
    return found
