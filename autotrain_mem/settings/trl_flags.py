"""Holds what is kept of TRL's own flags on disk: a worker writes, the parent tells a typo in one without TRL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotrain_mem.support import codec
from autotrain_mem.support.store import Store
from autotrain_mem.support.versions import local_key


@dataclass(frozen=True, kw_only=True, slots=True)
class TrlFlag:
    """One flag of the installed TRL, as argparse has it."""

    names: tuple[str, ...]
    """As they are typed: ``("--max_length", "--max-length")``."""
    dest: str
    nargs: int | str | None
    """0 for a switch."""
    kind: str
    """Name of the type that its values are read as; of most types only TRL knows what they refuse."""
    choices: tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrlFlags:
    """All flags of one method."""

    flags: tuple[TrlFlag, ...]
    help: str
    """TRL's help text, in as many columns as the terminal had."""


_KIND, _NAMES = "flags", "flag_names"


def kept_flags(store: Store, method: str) -> TrlFlags | None:
    """Returns the flags of a method; None where no worker has written them down, or the installed TRL lacks it."""
    kept = store.get(_KIND, _key(method))
    return None if kept is None else codec.from_json(TrlFlags, kept)


def kept_names(store: Store) -> Mapping[str, list[str]] | None:
    """Returns the names of the flags of every method that the installed TRL has, by method; None if none are kept."""
    return store.get(_NAMES, _key())


def keep_flags(store: Store, tables: Mapping[str, TrlFlags]) -> None:
    """Writes them down: an entry for each method, of which a command reads one."""
    for method, table in tables.items():
        store.put(_KIND, _key(method), codec.to_json(table))
    store.put(_NAMES, _key(), {method: [flag.dest for flag in table.flags] for method, table in tables.items()})


def _key(*method: str) -> dict[str, Any]:
    """A help text is as wide as ``COLUMNS`` says (``shutil.get_terminal_size``), or 80 columns."""
    return {"installed": local_key(), "columns": os.environ.get("COLUMNS"), "method": method}
