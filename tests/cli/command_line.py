"""What a command line leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ran:
    """Exit code and both outputs of one command line."""

    code: int
    out: str
    err: str


Autofit = Callable[..., Ran]
