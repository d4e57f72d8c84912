"""Shows a sweep with a line for each point, on a terminal and as CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from dataclasses import fields

from rich.console import Group, RenderableType
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import BAD, GOOD, QUIET, Indented, add, hanging, scale_for, section, table
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
"""Marks a figure that fits, for output without colour."""

HEADING_WIDTH = 15
"""Characters of a heading's line: per_device_train_batch_size takes three, so that several such columns fit in 80."""

_LEGEND = """\
needed is what torch reserves and what lies outside it.
autofit estimate without --sweep shows a point's parts, and what is not counted."""


def sweep_view(sweep: Sweep) -> RenderableType:
    """Shows what every point needs, which ones fit, and why some are refused; with a single axis also the parts."""
    knobs = [estimate.knobs for estimate in sweep.estimates]
    differing = {*formatting.differing(knobs), *(axis.name for axis in sweep.axes)}
    same = [field.name for field in fields(Knobs) if field.name not in differing]
    fitting = sum(estimate.fits for estimate in sweep.estimates)
    headline = f"{fitting} of {counted(len(sweep.points), 'point')} fit"
    where = {(estimate.hardware.name, estimate.budget_bytes) for estimate in sweep.estimates}
    for name, budget_bytes in where if len(where) == 1 else ():
        headline += f" {name}: budget {format_bytes(budget_bytes)}"

    scale = scale_for(max(estimate.required_bytes for estimate in sweep.estimates))
    reasons = dict.fromkeys(_reason(point) for point in sweep.points if point.refusal is not None)
    footnotes = {reason: f"[{number}]" for number, reason in enumerate(reasons, start=1)}
    names = [textwrap.wrap(axis.name.replace("_", "_ "), HEADING_WIDTH) for axis in sweep.axes]
    headings = ["\n".join(lines).replace("_ ", "_") for lines in names]
    numbers = [at for at, axis in enumerate(sweep.axes) if all(each.text.isdecimal() for each in axis.settings)]
    has_parts = len(sweep.axes) == 1
    parts = ["allocated", "reserved"] if has_parts else []
    figures = range(len(headings), len(headings) + len(parts) + 1)
    grid = table(*headings, *parts, "needed", *(["peak in"] if has_parts else []), right=(*numbers, *figures))
    for point in sweep.points:
        cells: list[str | Text] = [setting.text for setting in point.settings]
        if (estimate := point.estimate) is None:
            cells += [*("" for _ in parts), Text(footnotes[_reason(point)], style=QUIET)]
        else:
            held = (estimate.memory.peak_allocated_bytes, estimate.reserved.peak_reserved_bytes)
            cells += map(scale.size, held) if has_parts else []
            number = scale.size(estimate.required_bytes)
            fits = estimate.fits
            cells.append(Text(f"{FITS} {number}" if fits else number, style=GOOD if fits else BAD))
            cells += [formatting.PHASES[estimate.memory.peak_phase]] if has_parts else []
        add(grid, *cells)
    view: list[RenderableType] = [Text(headline, style="bold")]
    view.append(hanging(f"settings  {formatting.settings(knobs[0], same)}"))
    view += section(f"{', '.join([*parts, 'needed'])}: {scale.unit}", Text(), grid, indent=0)
    if footnotes:
        view += section("refused", *(f"{mark}  {reason}" for reason, mark in footnotes.items()))
    legend = f"{FITS} fits; {_LEGEND}" if fitting else _LEGEND
    return Indented(Group(*view, Text(), Text(legend, style=QUIET)))


def _reason(point: SweepPoint) -> str:
    """Returns the refusal in one line, without its hint: the other points of the sweep show what works."""
    return "" if point.refusal is None else " ".join(point.refusal.message.split())


def sweep_csv(sweep: Sweep) -> str:
    """Writes a line for each point: its settings, then figures in bytes, or why it was refused."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*(axis.name for axis in sweep.axes), *FIGURES, "refused"])
    for point in sweep.points:
        figures = {} if point.estimate is None else codec.to_json(point.estimate)
        values = ["" if figures.get(name) is None else formatting.value(figures[name]) for name in FIGURES]
        writer.writerow([*(setting.text for setting in point.settings), *values, _reason(point)])
    return out.getvalue()
