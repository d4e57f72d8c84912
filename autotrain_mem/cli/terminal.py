"""Makes the consoles that the command prints to."""

from __future__ import annotations

from rich.console import Console

UNWRAPPED_COLUMNS = 4000
"""Where no terminal shows it, a line is not wrapped: a name cut in two cannot be searched for in a log."""


def whole_lines(*, stderr: bool = False) -> Console:
    """A console that wraps at the terminal's width, and nowhere where there is none."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=UNWRAPPED_COLUMNS)
