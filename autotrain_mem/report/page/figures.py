"""Builds the figures of a page: for each a sentence, a table with the same content, and the values the script draws."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from autotrain_mem.report import formatting
from autotrain_mem.support import codec
from autotrain_mem.support.units import format_bytes, percent
from autotrain_mem.types import DataProfile, RunMarker, Section, Timeline

MOST_ROWS = 60
"""The approximate limit of rows in a figure's table."""
TORCH_BUDGET = "budget for torch"
"""The name of the limit of reserved bytes: the card's budget without the memory outside torch."""

Lines = Mapping[str, Sequence[float | None]]
"""The values of each line by its name; None where nothing was measured."""
Limits = Mapping[str, float]
"""Positions of horizontal lines by their names."""


def format_value(value: float | None, unit: str) -> str:
    """Writes a value with its unit.

    >>> format_value(2.5 * 2**30, "bytes"), format_value(1234.56, "tokens/s"), format_value(None, "")
    ('2.50 GiB', '1,235 tokens/s', '')
    """
    if value is None:
        return ""
    if unit == "bytes":
        return format_bytes(round(value))
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{digits} {unit}".rstrip()


def line_figure(
    key: str,
    title: str,
    axis: str,
    x: Sequence[float],
    lines: Lines,
    *,
    y_title: str,
    unit: str = "",
    limits: Limits | None = None,
    happened: Sequence[RunMarker] = (),
) -> Section:
    """Draws lines over a common axis; the table holds some of the points, and every incident.

    Args:
        axis: The unit of ``x``, which ascends: seconds or steps.
        unit: The unit of the values: ``bytes``, ``tokens/s``, or empty for a plain number.
        happened: The incidents to mark, on an axis of seconds.
    """
    is_clock, limits, sentences = "second" in axis, limits or {}, []

    def place(value: float) -> str:
        minutes, seconds = divmod(round(value), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if is_clock else format_value(value, "")

    for name, values in lines.items():
        if not (known := [value for value in values if value is not None]):
            continue
        first, last, least, most = (format_value(each, unit) for each in (known[0], known[-1], min(known), max(known)))
        course = f"begins at {first} and ends at {last}, and is between {least} and {most}"
        if {first, last} == {least, most}:
            verb = "rises" if first == least else "falls"
            course = f"stays at {first}" if least == most else f"{verb} from {first} to {last}"
        sentences.append(f"{name[:1].upper()}{name[1:]} {course}.")
    sentences += [f"The {name} is {format_value(value, unit)}." for name, value in limits.items()]
    if kinds := [each.kind for each in happened if each.kind not in ("start", "end")]:
        counts = ", ".join(f"{kind} ({kinds.count(kind)})" for kind in dict.fromkeys(kinds))
        sentences.append(f"Marked: {counts}.")
    shown = sorted({*range(0, len(x), max(1, -(-len(x) // MOST_ROWS))), len(x) - 1})
    no_mark, blank = ("",) if happened else (), [""] * len(lines)
    rows = [(x[at], (*(format_value(each[at], unit) for each in lines.values()), *no_mark)) for at in shown]
    rows += [(each.seconds, (*blank, f"{each.kind}, step {each.step:,}: {each.text}")) for each in happened]
    return Section(
        key=key,
        title=title,
        note=" ".join(sentences),
        columns=(axis, *lines, *(["Incident"] if happened else [])),
        rows=tuple((place(at), *cells) for at, cells in sorted(rows, key=lambda row: row[0])),
        figure=_figure(
            x,
            _named(lines),
            limits,
            home=max(len(x) - 1, 0),
            x_title="time" if is_clock else axis,
            y_title="" if y_title.lower() == title.lower() else y_title,
            unit=unit,
            marks=codec.to_json(tuple(happened)),
        ),
    )


def histogram_figure(key: str, title: str, profile: DataProfile, cut: int | None) -> Section:
    """Draws the share of rows in each bin of lengths, on a logarithmic axis, with those longer than ``cut`` tokens in
    another colour. The number of bins is Rice's rule: twice the cube root of the rows. Empty rows are left out."""
    counts = {length: rows for length, rows in profile.rows_by_length.items() if length}
    least, total, most = min(counts), sum(counts.values()), profile.longest
    bins = min(MOST_ROWS, math.ceil(2 * total ** (1 / 3)))
    edges = sorted({round(least * ((most + 1) / least) ** (at / bins)) for at in range(bins + 1)})
    whole, longer = [0] * len(edges), [0] * len(edges)  # the last edge only ends a bin
    for length, rows in counts.items():
        (whole if cut is None or length <= cut else longer)[bisect_right(edges, length) - 1] += rows
    half, most_rows = profile.percentile(0.5), profile.percentile(0.95)
    note = f"Half of the rows have at most {half:,} tokens, 95 % at most {most_rows:,}, the longest {most:,}."
    areas, verticals = {"rows": (whole, "series-1")}, {}
    if cut is not None:
        share = percent(profile.truncated_rows_fraction(cut)) if any(longer) else "none"
        note += f" max_length {cut:,} {'drops' if profile.drops else 'truncates'} {share} of them."
        areas = {f"longer than {cut:,}": (longer, "series-2"), f"up to {cut:,}": (whole, "series-1")}
        verticals = {f"max_length {cut:,}: {share} are longer": math.log2(cut)}
    rows_of = [sum(both) for both in zip(whole, longer, strict=True)]
    lines = [
        {"name": name, "colour": colour, "stacked": True, "values": [100 * rows / total for rows in each]}
        for name, (each, colour) in areas.items()
        if any(each)
    ]
    table = zip(pairwise(edges), rows_of[:-1], strict=True)
    return Section(
        key=key,
        title=title,
        note=note,
        columns=("tokens", "rows", "share of the rows"),
        rows=tuple((f"{low:,} to {end - 1:,}", f"{rows:,}", percent(rows / total)) for (low, end), rows in table),
        figure=_figure(
            [math.log2(edge) for edge in edges],
            lines,
            {},
            home=rows_of.index(max(rows_of)),
            x_title="tokens",
            y_title="% of the rows",
            unit="%",
            verticals=verticals,
            steps=True,
            is_log=True,
        ),
    )


def bar_figure(key: str, title: str, groups: Sequence[str], lines: Lines, unit: str) -> Section:
    """Draws a group of bars for each name, one bar for each line; the table holds them all."""
    sizes = [[-1 if value is None else value for value in each] for each in lines.values()]
    tallest = [each.index(max(each)) for each in sizes]
    highest = [
        f"{name} {format_value(each[at], unit)}, in {groups[at]}"
        for name, each, at in zip(lines, sizes, tallest, strict=True)
    ]
    return Section(
        key=key,
        title=title,
        note=f"Highest: {'; '.join(highest)}.",
        columns=("", *lines),
        rows=tuple(zip(groups, *([format_value(each, unit) for each in row] for row in lines.values()), strict=True)),
        figure=_figure(range(len(groups)), _named(lines), {}, home=tallest[0], unit=unit, rows=[*groups]),
    )


def _figure(
    x: Sequence[float], lines: Sequence[Mapping[str, Any]], limits: Limits, *, home: int, **more: Any
) -> dict[str, Any]:
    """Returns what ``static/page.js`` draws; while the mouse is on no point, the page describes the point ``home``."""
    blank: dict[str, Any] = {
        "x_title": "",
        "y_title": "",
        "verticals": {},
        "marks": [],
        "steps": False,
        "is_log": False,
    }
    return {**blank, "x": [*x], "lines": [*lines], "limits": {**limits}, "home": home, **more}


def _named(lines: Lines) -> list[dict[str, Any]]:
    return [{"name": name, "values": [*values]} for name, values in lines.items()]


def timeline_figure(timeline: Timeline) -> Section:
    """Draws memory event by event, stacked by owner; the table holds the highest moment of each stretch of a phase."""
    totals = [sum(column) for column in zip(*timeline.owners.values(), strict=True)]
    peak, owners = timeline.peak, {formatting.OWNERS[owner]: sizes for owner, sizes in timeline.owners.items()}
    starts, names = [first for _, first in timeline.phases], [formatting.PHASES[phase] for phase, _ in timeline.phases]

    def phase_at(point: int) -> str:
        return names[index - 1] if (index := bisect_right(starts, timeline.event[point])) else ""

    largest = sorted(((sizes[peak], name) for name, sizes in owners.items()), reverse=True)
    parts = ", ".join(f"{name} {format_bytes(size)}" for size, name in largest[:3] if size)
    summary = (
        f"Tensors hold most in {phase_at(peak) or 'the step'}: {format_bytes(totals[peak])} ({parts}). torch reserves "
        f"{format_bytes(max(timeline.reserved_bytes))} for them; its budget is {format_bytes(timeline.budget_bytes)}. "
        f"{len(totals):,} of {timeline.events:,} events are drawn, with all peaks."
    )
    stretches = pairwise([0, *(bisect_left(timeline.event, first) for first in starts), len(totals)])
    highest = {max(range(first, end), key=totals.__getitem__) for first, end in stretches if first < end}
    rows = []
    for point in sorted({peak, *sorted(highest, key=totals.__getitem__, reverse=True)[:MOST_ROWS]}):
        sizes = (format_bytes(column[point]) for column in (totals, timeline.reserved_bytes, *owners.values()))
        largest_holders = timeline.holders[point][:1]
        holders = [f"{_module(timeline, each.module)}: {format_bytes(each.size_bytes)}" for each in largest_holders]
        rows.append((phase_at(point), f"{timeline.event[point]:,}", *sizes, *(holders or [""])))
    return Section(
        key="memory",
        title=f"Memory over the {timeline.name}",
        note=summary,
        columns=("Phase", "Event", "Tensors", "Reserved", *owners, "Largest holder"),
        rows=tuple(rows),
        figure=_stacked_figure(timeline, names),
    )


def _module(timeline: Timeline, index: int) -> str:
    return timeline.modules[index] or "(no module)"


def _changes(values: Sequence[int]) -> list[int]:
    """Returns the first value and the change to each later one: these have fewer digits, and most are 0."""
    return [*values[:1], *(after - before for before, after in pairwise(values))]


def _stacked_figure(timeline: Timeline, names: Sequence[str]) -> dict[str, Any]:
    """Returns the figure of a timeline: owners as stacked areas, the uppermost first, and reserved memory as a line.
    ``held`` lists for each point the indices of its rows in ``holders``, since most of these rows recur."""
    areas = [
        {"name": formatting.OWNERS[owner], "colour": str(owner), "stacked": True, "changes": _changes(sizes)}
        for owner, sizes in reversed([*timeline.owners.items()])
        if any(sizes)
    ]
    reserved = {"name": "reserved by torch", "colour": "ink", "changes": _changes(timeline.reserved_bytes)}
    owners = [formatting.OWNERS[owner] for owner in timeline.owners]
    numbers = dict[tuple[str, str, int], int]()
    held = []
    for moment in timeline.holders:
        rows = [(_module(timeline, each.module), owners[each.owner], each.size_bytes) for each in moment]
        held.append([numbers.setdefault(row, len(numbers)) for row in rows])
    runs = [[*run] for _, run in groupby(zip(names, timeline.phases, strict=True), key=lambda each: each[0])]
    ends = [run[0][1][1] for run in runs[1:]] + [timeline.event[-1]]
    return _figure(
        timeline.event,
        [*areas, reserved],
        {TORCH_BUDGET: timeline.budget_bytes},
        home=timeline.peak,
        x_title="events of the rehearsal",
        unit="bytes",
        steps=True,
        events=timeline.events,
        peak=timeline.peak,
        phases=[[run[0][0], run[0][1][1], end] for run, end in zip(runs, ends, strict=True)],
        holders=[*numbers],
        held=held,
    )
