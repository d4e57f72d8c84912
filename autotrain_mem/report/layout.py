"""Lays out all views: plain text, indented blocks, tables without borders."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from autotrain_mem.report.error_text import label_of
from autotrain_mem.support.units import format_bytes, parse_bytes

GOOD = "green"
BAD = "red"
LOUD = "bold yellow"
QUIET = "dim"


@dataclass(frozen=True, slots=True)
class Indented:
    """Indents content, and strips the spaces with which rich pads lines: they spoil logs and diffs."""

    content: RenderableType
    indent: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrower = options.update_width(max(1, options.max_width - self.indent))
        for line in console.render_lines(self.content, narrower, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                text, style, control = line.pop()
                yield Segment(" " * self.indent)
                yield from line
                yield Segment(text.rstrip(), style, control)
            yield Segment.line()


def table(*headings: str, right: tuple[int, ...] = (), show_header: bool = True) -> Table:
    """Makes a table without borders; the columns in ``right`` hold numbers."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=show_header, header_style=QUIET)
    for index, heading in enumerate(headings):
        grid.add_column(Text(heading), justify="right" if index in right else "left", overflow="fold")
    return grid


def add(grid: Table, *cells: str | RenderableType, style: str = "") -> None:
    """Adds a row of plain text or renderables."""
    grid.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)


def hanging(line: str) -> RenderableType:
    """Aligns a wrapped line with its text, not with its label: ``--plan_only  plans for that card ...``."""
    if not (label := label_of(line)):
        return Text(line)
    grid = Table.grid()
    grid.add_column(no_wrap=True, width=len(label))
    grid.add_column(overflow="fold")
    grid.add_row(Text(label), Text(line[len(label) :]))
    return grid


def section(heading: str, *content: RenderableType, indent: int = 2) -> list[RenderableType]:
    """Returns a blank line, the heading, and the content below it; wrapped text is aligned as by :func:`hanging`."""
    below = (hanging(each) if isinstance(each, str) else each for each in content)
    return [Text(), Text(heading, style="bold"), *(Indented(each, indent) for each in below)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Writes a column of sizes in one unit, with two decimals."""

    unit: str
    unit_bytes: int

    def hundredths(self, size_bytes: int) -> int:
        return (200 * size_bytes + self.unit_bytes) // (2 * self.unit_bytes)

    def size(self, size_bytes: int) -> str:
        return f"{self.hundredths(size_bytes) / 100:.2f}"

    def column(self, sizes_bytes: Iterable[int | None]) -> list[str]:
        """Writes sizes, and for None the sum of the sizes above it, so that the written numbers add up.

        A size is written as the rounded sum including it minus the rounded sum before it; the error is below 0.01.
        Sizes 0.004, 0.004 and 0.003 (0.011 in all) are written as 0.00, 0.01 and 0.00, and their sum as 0.01.
        """
        total_bytes, cells = 0, []
        for size_bytes in sizes_bytes:
            before = 0 if size_bytes is None else self.hundredths(total_bytes)
            total_bytes += size_bytes or 0
            cells.append(f"{abs(self.hundredths(total_bytes) - before) / 100:.2f}")
        return cells


def scale_for(largest_bytes: int) -> Scale:
    """Returns the unit in which ``format_bytes`` writes the largest size of a column."""
    unit = format_bytes(largest_bytes).split()[-1]
    return Scale(unit=unit, unit_bytes=parse_bytes(f"1 {unit}"))
