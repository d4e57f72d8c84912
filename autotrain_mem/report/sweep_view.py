"""A sweep as a person reads it: a list for one axis, a matrix for two, a line for each point beyond; and as CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import fields

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import BAD, GOOD, QUIET, Indented, Scale, add, hanging, scale_for, section, table
from autotrain_mem.support.units import counted, format_bytes
from autotrain_mem.types import Knobs, codec
from autotrain_mem.types.sweep import Sweep, SweepPoint

FIGURES = (
    *("peak_allocated_bytes", "peak_reserved_bytes", "non_torch_bytes", "communicators_bytes", "vllm_share_bytes"),
    *("required_bytes", "budget_bytes", "fits", "peak_phase", "step_seconds", "tokens_per_second"),
)
"""Columns of the CSV behind the swept flags, by their keys in the JSON of an estimate."""

FITS = "*"
"""Beside a figure that fits, where no colour tells."""

HEADING_WIDTH = 14
"""Characters of a heading's line: the words of per_device_train_batch_size stand in three, so that several such columns
find room in 80."""


def sweep_view(sweep: Sweep) -> RenderableType:
    """Shows what every point needs, which ones fit, and why some are refused."""
    figures = _Figures(sweep)
    knobs = [estimate.knobs for estimate in sweep.estimates]
    differing = {*formatting.differing(knobs), *(axis.name for axis in sweep.axes)}
    same = [field.name for field in fields(Knobs) if field.name not in differing]
    parts = [_headline(sweep), hanging(f"settings  {formatting.settings(knobs[0], same)}")]
    if len(sweep.axes) == 2:
        down, across = sweep.axes
        caption = f"needed, {figures.scale.unit}, by {down.name} (down) and {across.name} (across)"
        parts += [*section(caption), Text(), _Matrix(sweep, figures)]
    else:
        parts += _lines(sweep, figures)
    if figures.reasons:
        reasons = [Indented(hanging(f"{mark}  {reason}"), 2) for reason, mark in figures.reasons.items()]
        parts += section("refused", *reasons)
    fits = f"{FITS} fits; " if any(estimate.fits for estimate in sweep.estimates) else ""
    return Indented(Group(*parts, Text(), Text(f"{fits}{_LEGEND}", style=QUIET)))


class _Figures:
    """The cells: all in one unit, refusals by the number of their footnote."""

    def __init__(self, sweep: Sweep) -> None:
        self.scale: Scale = scale_for(max(estimate.required_bytes for estimate in sweep.estimates))
        reasons = dict.fromkeys(_reason(point) for point in sweep.points if point.refusal is not None)
        self.reasons = {reason: f"[{number}]" for number, reason in enumerate(reasons, start=1)}

    def needed(self, point: SweepPoint) -> Text:
        """``* 8.41`` where it fits, ``31.20`` where it does not, ``[1]`` where it was refused."""
        if point.estimate is None:
            return Text(self.reasons[_reason(point)], style=QUIET)
        number = self.size(point.estimate.required_bytes)
        return Text(f"{FITS} {number}", style=GOOD) if point.estimate.fits else Text(number, style=BAD)

    def size(self, size_bytes: int) -> str:
        return self.scale.write(self.scale.steps(size_bytes))


def _reason(point: SweepPoint) -> str:
    """The refusal in one line; what to do about it stays in the JSON, since the sweep itself is the answer."""
    return "" if point.refusal is None else " ".join(point.refusal.message.split())


def _headline(sweep: Sweep) -> RenderableType:
    fitting = sum(estimate.fits for estimate in sweep.estimates)
    count = counted(len(sweep.points), "point")
    where = {(estimate.hardware.name, estimate.budget_bytes) for estimate in sweep.estimates}
    if len(where) > 1:
        return Text(f"{fitting} of {count} fit", style="bold")
    name, budget_bytes = where.pop()
    return Text(f"{fitting} of {count} fit {name}: budget {format_bytes(budget_bytes)}", style="bold")


_LEGEND = """\
needed is what torch reserves and what lies outside it.
autofit estimate without --sweep shows a point's parts, and what is not counted."""


class _Matrix:
    """The first axis down, the second across, in as many pieces as the width takes: a wrapped row cannot be read."""

    def __init__(self, sweep: Sweep, figures: _Figures) -> None:
        self._labels, self._columns = ([setting.text for setting in axis.settings] for axis in sweep.axes)
        cells = iter(sweep.points)
        self._cells = [[figures.needed(next(cells)) for _ in self._columns] for _ in self._labels]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, (first, last) in enumerate(self._pieces(options.max_width)):
            if number:
                yield Text()
            yield self._piece(first, last)

    def _pieces(self, width: int) -> list[tuple[int, int]]:
        """Ranges of columns that fit the width, each of at least one."""
        labels = max(map(len, self._labels))
        pieces, first, used = [], 0, labels
        for index, column in enumerate(self._columns):
            needed = 2 + max(len(column), *(row[index].cell_len for row in self._cells))
            if used + needed > width and index > first:
                pieces.append((first, index))
                first, used = index, labels
            used += needed
        return [*pieces, (first, len(self._columns))]

    def _piece(self, first: int, last: int) -> Table:
        columns = self._columns[first:last]
        grid = table("", *columns, right=tuple(range(len(columns) + 1)))
        for label, row in zip(self._labels, self._cells, strict=True):
            add(grid, Text(label, style="bold"), *row[first:last])
        return grid


def _lines(sweep: Sweep, figures: _Figures) -> list[RenderableType]:
    """A line for each point; the parts of what it needs where a single axis leaves them room."""
    detailed = len(sweep.axes) == 1
    before, behind = (("allocated", "reserved"), ("peak in",)) if detailed else ((), ())
    headings = [*(_broken(axis.name) for axis in sweep.axes), *before, "needed", *behind]
    decimal = [all(setting.text.isdecimal() for setting in axis.settings) for axis in sweep.axes]
    numbers = [*decimal, *(True for _ in before), True, *(False for _ in behind)]
    grid = table(*headings, right=tuple(index for index, right in enumerate(numbers) if right))
    for point in sweep.points:
        settings = [setting.text for setting in point.settings]
        sizes, phase = _details(point, figures) if detailed else ([], [])
        add(grid, *settings, *sizes, figures.needed(point), *phase)
    return [*section(f"{', '.join((*before, 'needed'))}: {figures.scale.unit}"), Text(), grid]


def _details(point: SweepPoint, figures: _Figures) -> tuple[list[str], list[str]]:
    """(what stands before the sum, what stands behind it); blank where there is no estimate."""
    estimate = point.estimate
    if estimate is None:
        return ["", ""], [""]
    sizes = (estimate.memory.peak_allocated_bytes, estimate.reserved.peak_reserved_bytes)
    return [figures.size(size) for size in sizes], [formatting.PHASES[estimate.memory.peak_phase]]


def _broken(name: str) -> str:
    """``per_device_train_batch_size`` in lines of at most ``HEADING_WIDTH``, broken behind underscores."""
    lines = [""]
    for word in name.replace("_", "_ ").split():
        if lines[-1] and len(lines[-1]) + len(word) > HEADING_WIDTH:
            lines.append("")
        lines[-1] += word
    return "\n".join(lines)


def sweep_csv(sweep: Sweep) -> str:
    """A line for each point: the settings as they were written, then figures in bytes, or why there are none."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*(axis.name for axis in sweep.axes), *FIGURES, "refused"])
    for point in sweep.points:
        figures = {} if point.estimate is None else codec.to_json(point.estimate)
        values = ["" if figures.get(name) is None else formatting.value(figures[name]) for name in FIGURES]
        writer.writerow([*(setting.text for setting in point.settings), *values, _reason(point)])
    return out.getvalue()
