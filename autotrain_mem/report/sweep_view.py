"""A sweep as a person reads it: a list for one axis, a matrix for two, a line for each point beyond; and as CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from dataclasses import fields

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import BAD, GOOD, QUIET, Indented, Scale, add, hanging, scale_for, section, table
from autotrain_mem.support import codec
from autotrain_mem.support.units import counted, format_bytes
from autotrain_mem.types import Knobs
from autotrain_mem.types.gpu_comparison import Sweep, SweepPoint

FIGURES = (
    *("peak_allocated_bytes", "peak_reserved_bytes", "non_torch_bytes", "communicators_bytes", "vllm_share_bytes"),
    *("required_bytes", "budget_bytes", "fits", "peak_phase", "step_seconds", "tokens_per_second"),
)
"""Columns of the CSV behind the swept flags, by their keys in the JSON of an estimate."""

FITS = "*"
"""Beside a figure that fits, where no colour tells."""

UNLIMITED = 100_000
"""Columns, more than any table has."""

HEADING_WIDTH = 15
"""Characters of a heading's line: the words of per_device_train_batch_size stand in three, so that several such columns
find room in 80."""


def sweep_view(sweep: Sweep) -> RenderableType:
    """Shows what every point needs, which ones fit, and why some are refused."""
    figures = _Figures(sweep)
    knobs = [estimate.knobs for estimate in sweep.estimates]
    differing = {*formatting.differing(knobs), *(axis.name for axis in sweep.axes)}
    same = [field.name for field in fields(Knobs) if field.name not in differing]
    fitting = sum(estimate.fits for estimate in sweep.estimates)
    headline = f"{fitting} of {counted(len(sweep.points), 'point')} fit"
    where = {(estimate.hardware.name, estimate.budget_bytes) for estimate in sweep.estimates}
    for name, budget_bytes in where if len(where) == 1 else ():
        headline += f" {name}: budget {format_bytes(budget_bytes)}"
    parts = [Text(headline, style="bold"), hanging(f"settings  {formatting.settings(knobs[0], same)}")]
    if len(sweep.axes) == 2:
        down, across = sweep.axes
        caption = f"needed, {figures.scale.unit}, by {down.name} (down) and {across.name} (across)"
        parts += section(caption, Text(), _Matrix(sweep, figures), indent=0)
    else:
        what = "allocated, reserved, needed" if len(sweep.axes) == 1 else "needed"
        parts += section(f"{what}: {figures.scale.unit}", Text(), _lines(sweep, figures), indent=0)
    if figures.reasons:
        parts += section("refused", *(f"{mark}  {reason}" for reason, mark in figures.reasons.items()))
    fits = f"{FITS} fits; " if fitting else ""
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
        number = self.scale.size(point.estimate.required_bytes)
        return Text(f"{FITS} {number}", style=GOOD) if point.estimate.fits else Text(number, style=BAD)


def _reason(point: SweepPoint) -> str:
    """The refusal in one line; what to do about it stays in the JSON, since the sweep itself is the answer."""
    return "" if point.refusal is None else " ".join(point.refusal.message.split())


_LEGEND = """\
needed is what torch reserves and what lies outside it.
autofit estimate without --sweep shows a point's parts, and what is not counted."""


class _Matrix:
    """The first axis down, the second across; a line for each point where they take too much width."""

    def __init__(self, sweep: Sweep, figures: _Figures) -> None:
        self._sweep, self._figures = sweep, figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        down, across = self._sweep.axes
        headings = [setting.text for setting in across.settings]
        grid = table("", *headings, right=tuple(range(1 + len(headings))))
        points = iter(self._sweep.points)
        for setting in down.settings:
            add(grid, Text(setting.text, style="bold"), *(self._figures.needed(next(points)) for _ in headings))
        fits = console.measure(grid, options=options.update(width=UNLIMITED)).maximum <= options.max_width
        yield grid if fits else _lines(self._sweep, self._figures)


def _lines(sweep: Sweep, figures: _Figures) -> Table:
    """A line for each point; the parts of what it needs where a single axis leaves them room."""
    detailed = len(sweep.axes) == 1
    before, behind = (("allocated", "reserved"), ("peak in",)) if detailed else ((), ())
    headings = [*(_broken(axis.name) for axis in sweep.axes), *before, "needed", *behind]
    decimal = [all(setting.text.isdecimal() for setting in axis.settings) for axis in sweep.axes]
    numbers = [*decimal, *(True for _ in before), True, *(False for _ in behind)]
    grid = table(*headings, right=tuple(index for index, right in enumerate(numbers) if right))
    for point in sweep.points:
        estimate, phase = point.estimate, ""
        sizes = ["" for _ in before]
        if detailed and estimate is not None:
            held = (estimate.memory.peak_allocated_bytes, estimate.reserved.peak_reserved_bytes)
            sizes, phase = [*map(figures.scale.size, held)], formatting.PHASES[estimate.memory.peak_phase]
        settings = (setting.text for setting in point.settings)
        add(grid, *settings, *sizes, figures.needed(point), *(phase for _ in behind))
    return grid


def _broken(name: str) -> str:
    """``per_device_train_batch_size`` in lines of about ``HEADING_WIDTH``, broken behind underscores."""
    return "\n".join(textwrap.wrap(name.replace("_", "_ "), HEADING_WIDTH)).replace("_ ", "_")


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
