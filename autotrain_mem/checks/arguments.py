"""Reads the user's flags and YAML keys with TRL's own parser."""

import contextlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from autotrain_mem.checks import table
from autotrain_mem.checks.flag_checks import Flags
from autotrain_mem.methods.interface import method_of
from autotrain_mem.settings.trl_parser import (
    TrlFlags,
    actions_of,
    check_finite,
    keep_flags,
    kept_flags,
    read_given,
    table_of,
)
from autotrain_mem.settings.words import MOST, SAME_ARGUMENT
from autotrain_mem.support.errors import MissingExtraError
from autotrain_mem.support.store import Store, cache_folder
from autotrain_mem.types import METHODS, Knobs
from autotrain_mem.types.findings import refuse


def parse(
    method: str,
    argv: tuple[str, ...],
    config: Mapping[str, Any],
    also_known: tuple[str, ...],
    pins: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], Knobs]:
    """Returns the arguments that the user gave, under TRL's names, and TRL's defaults for what a plan decides.

    Args:
        argv: Flags without our own.
        config: Top-level keys of the YAML file without our own; a flag overrides its key.
        also_known: Our own names, for did-you-mean.
        pins: The given knobs that TRL does not have.
        own: Our other flags that the user gave, which may contradict TRL's.

    Raises:
        UsageError: a flag or key is unknown, TRL refuses a value, flags contradict each other, or cannot be rehearsed.
    """
    parser, store = method_of(method).make_parser(), Store(cache_folder())
    if kept_flags(store, method) is None:
        keep_flags(store, method, table_of(parser))
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
    """Returns TRL's defaults for what a plan decides, for a script's config that TRL has accepted. Raises UsageError,
    which lists all contradictions and all settings that cannot be rehearsed."""
    check_finite(given)
    refuse(table.FLAGS, Flags(method=method, given=given, own=own))
    return _knobs({name: action.default for name, action in actions_of(method_of(method).make_parser()).items()})


def _knobs(defaults: Mapping[str, Any]) -> Knobs:
    return Knobs(**{field.name: defaults[field.name] for field in fields(Knobs) if field.name in defaults})


def flag_tables() -> dict[str, TrlFlags]:
    """Returns the flags and help of every method in the installed TRL."""
    tables = {}
    for method in METHODS:
        with contextlib.suppress(MissingExtraError):
            tables[method] = table_of(method_of(method).make_parser())
    return tables


def _methods_with(name: str) -> list[str]:
    """Returns the methods whose parser has a flag of this name. Slow: called only before a command fails."""
    methods = []
    for method in METHODS:
        with contextlib.suppress(MissingExtraError):
            if any(action.dest == name for action in method_of(method).make_parser()._actions):
                methods.append(method)
    return methods
