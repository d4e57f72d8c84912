"""Makes the consoles that everything is printed to."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from autotrain_mem.support.lossy_stream import LossyStream
from autotrain_mem.support.printable import printable

UNWRAPPED_COLUMNS = 4000
"""Where no terminal shows it, a line is not wrapped: a name cut in two cannot be searched for in a log."""


class Console(rich.console.Console):
    """Prints text as it is: a name may hold square brackets, and what would steer a terminal is spelled out.

    rich itself lets escape sequences through (``rich/control.py: STRIP_CONTROL_CODES``). All text of a view comes by
    ``render``, before it is measured and wrapped.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text) and (shown := printable(renderable.plain)) != renderable.plain:
            renderable = renderable.blank_copy(shown)
        return super().render(renderable, options)


def whole_lines(*, stderr: bool = False) -> Console:
    """Make a console that wraps at the terminal's width, and nowhere where there is none."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=UNWRAPPED_COLUMNS)


def lasting_console(*, stderr: bool = False) -> Console:
    """A console for what is told while a training runs: a closed terminal, a full disk and ``| head`` end nothing."""
    return Console(file=LossyStream(sys.stderr if stderr else sys.stdout))
