"""The few shapes that all views are made of: plain text, indented blocks, tables without lines, a small bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from autotrain_mem.report.error_text import label_of
from autotrain_mem.support.units import format_bytes, parse_bytes

GOOD = "green"
BAD = "red"
LOUD = "bold yellow"
QUIET = "dim"
TITLE = "bold"


@dataclass(frozen=True, slots=True)
class Indented:
    """Content indented, and without the spaces that rich fills its lines up with: they spoil logs and diffs."""

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


class Bar:
    """A bar of up to ``width`` characters, ASCII where the output cannot take more."""

    def __init__(self, fraction: float, width: int = 24) -> None:
        self._characters = max(1, round(fraction * width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Segment(("#" if options.ascii_only else "━") * self._characters)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self._characters, self._characters)


def table(*headings: str, right: tuple[int, ...] = (), show_header: bool = True) -> Table:
    """A table without lines; ``right`` holds the columns of numbers."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=show_header, header_style=QUIET)
    for index, heading in enumerate(headings):
        grid.add_column(Text(heading), justify="right" if index in right else "left", overflow="fold")
    return grid


def add(grid: Table, *cells: str | RenderableType, style: str = "") -> None:
    """Add a row of plain text or renderables."""
    grid.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)


def title(text: str) -> Text:
    """The line above a block."""
    return Text(text, style=TITLE)


def section(heading: str, *content: RenderableType) -> list[RenderableType]:
    """A blank line, the heading and what stands below it."""
    return [Text(), title(heading), *content]


def hanging(line: str) -> RenderableType:
    """A line that wraps below its text, not below its label: ``--plan_only  plans for that card ...``."""
    label = label_of(line)
    if not label:
        return Text(line)
    grid = Table.grid()
    grid.add_column(no_wrap=True, width=len(label))
    grid.add_column(overflow="fold")
    grid.add_row(Text(label), Text(line[len(label) :]))
    return grid


STEPS_PER_UNIT = 100
"""A column counts in hundredths of its unit, called steps here: 8.41 is 841 steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The unit of a column.

    Example: sizes of 4, 4 and 3 thousandths of a unit sum to 0.011, which reads 0.01; ``share`` writes the parts as
    0.01, 0.00 and 0.00, where rounding each by itself would show three times 0.00.
    """

    unit: str
    unit_bytes: int

    def steps(self, size_bytes: int) -> int:
        """The size in hundredths of the unit, rounded half up."""
        return (2 * size_bytes * STEPS_PER_UNIT + self.unit_bytes) // (2 * self.unit_bytes)

    def share(self, total_steps: int, sizes_bytes: Sequence[int]) -> list[int]:
        """Round the parts, each up or down, so that they sum to ``total_steps``, the total already rounded either way.

        What is lost by rounding down goes to the parts that lost most (Hamilton's method of apportionment).

        Raises:
            ValueError: the parts do not sum to the total, so that no rounding makes the column add up.
        """
        floors = [size * STEPS_PER_UNIT // self.unit_bytes for size in sizes_bytes]
        missing = total_steps - sum(floors)
        if abs(sum(sizes_bytes) * STEPS_PER_UNIT - total_steps * self.unit_bytes) >= self.unit_bytes:
            raise ValueError(f"parts of {sum(sizes_bytes)} bytes do not sum to {self.write(total_steps)} {self.unit}")
        lost = [size * STEPS_PER_UNIT % self.unit_bytes for size in sizes_bytes]
        rounded_up = sorted(range(len(lost)), key=lambda part: -lost[part])[:missing]
        return [floor + (part in rounded_up) for part, floor in enumerate(floors)]

    def write(self, steps: int) -> str:
        """``write(841) == "8.41"``."""
        return f"{steps / STEPS_PER_UNIT:.2f}"

    def size(self, size_bytes: int) -> str:
        return self.write(self.steps(size_bytes))


def scale_for(largest_bytes: int) -> Scale:
    """The unit that ``format_bytes`` takes for the largest size of a column."""
    unit = format_bytes(largest_bytes).split()[-1]
    return Scale(unit=unit, unit_bytes=parse_bytes(f"1 {unit}"))
