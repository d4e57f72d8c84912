"""Holds what is kept of TRL's own flags, so that a typo in one is told without TRL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autotrain_mem.support.codec import Form


@dataclass(frozen=True, kw_only=True, slots=True)
class TrlFlag:
    """One flag of the installed TRL, as argparse has it."""

    json_form: ClassVar = Form(is_row=True)

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
