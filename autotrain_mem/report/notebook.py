"""Shows results in a notebook as the terminal shows them, in the colours of the page, be it light or dark."""

from __future__ import annotations

import io

from rich.console import RenderableType
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

from autotrain_mem.report.console import report_view
from autotrain_mem.report.first_screen import estimate_screen, first_screen
from autotrain_mem.report.gpu_comparison import cards_view
from autotrain_mem.report.terminal import Console
from autotrain_mem.types import Estimate, Plan, Report
from autotrain_mem.types.gpu_comparison import Cards

COLUMNS = 100
_PAGE = '<pre style="white-space: pre; overflow-x: auto; line-height: 1.3">{code}</pre>'

Shown = Plan | Estimate | Report | Cards


def html_of(shown: Shown) -> str:
    """Renders what ``_repr_html_`` gives: the terminal's view, every text escaped."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, force_jupyter=False)
    console.print(_view(shown))
    return console.export_html(inline_styles=True, theme=DEFAULT_TERMINAL_THEME, code_format=_PAGE)


def _view(shown: Shown) -> RenderableType:
    match shown:
        case Plan():
            return first_screen(shown)
        case Estimate():
            return estimate_screen(shown)
        case Report():
            return report_view(shown)
        case Cards():
            return cards_view(shown)
