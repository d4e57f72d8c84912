"""Makes of each figure of a page what its HTML holds: a sentence, a table, and what the script draws."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import codec
from autotrain_mem.types.page import Bars, Chart, Holder, Series, Timeline

MOST_ROWS = 60
"""Of the table that stands in a figure's place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Holds a figure as text, and as data for the script."""

    key: str
    """Is unique on the page, and made of small letters, digits and hyphens."""
    title: str
    summary: str
    """Says in a sentence, with figures, what the eye sees."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """At most about ``MOST_ROWS``."""
    data: Mapping[str, Any]
    """``kind`` and what the script of that name in ``static`` draws."""


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


def spread(count: int, wanted: set[int], most: int = MOST_ROWS) -> list[int]:
    """Chooses at most ``most`` indices, evenly, and those that are ``wanted``."""
    step = max(1, -(-count // most))
    return sorted({*range(0, count, step), *wanted, *([count - 1] if count else [])})


def chart_figure(chart: Chart) -> Figure:
    """Makes the figure of lines; its table holds some points, the extremes of each line, and every mark."""
    extremes = {index for each in chart.series for index in _extremes(each)}
    blank = ("",) * len(chart.series)
    marks = [
        (each.seconds, (_time(each.seconds, chart.x_title), *blank, f"{each.kind}, step {each.step:,}: {each.text}"))
        for each in chart.marks
    ]
    points = spread(len(chart.x), extremes)
    rows = [(chart.x[point], (_time(chart.x[point], chart.x_title), *_values(chart, point))) for point in points]
    return Figure(
        key=chart.key,
        title=chart.title,
        summary=" ".join(_sentences(chart)),
        columns=(chart.x_title, *(each.name for each in chart.series), *(["Incident"] if chart.marks else [])),
        rows=tuple(row for _, row in sorted([*rows, *marks], key=lambda pair: pair[0])),
        data={"kind": "chart", **codec.to_json(chart)},
    )


def _values(chart: Chart, point: int) -> tuple[str, ...]:
    values = tuple(format_value(each.values[point], chart.unit) for each in chart.series)
    return (*values, "") if chart.marks else values


def _time(value: float, title: str) -> str:
    """Writes seconds as a clock does, and any other place on the axis as a number."""
    if "second" not in title:
        return format_value(value, "")
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _extremes(series: Series) -> tuple[int, ...]:
    known = [(value, index) for index, value in enumerate(series.values) if value is not None]
    return (min(known)[1], max(known)[1]) if known else ()


def _sentences(chart: Chart) -> list[str]:
    sentences = [_course(each, chart.unit) for each in chart.series]
    sentences += [f"The line {name} is at {format_value(value, chart.unit)}." for name, value in chart.limits.items()]
    sentences += [f"{name} is at {format_value(value, '')}." for name, value in (chart.verticals or {}).items()]
    if chart.marks:
        kinds = dict.fromkeys(mark.kind for mark in chart.marks)
        counts = ", ".join(f"{kind} ({sum(mark.kind == kind for mark in chart.marks)})" for kind in kinds)
        sentences.append(f"Marked are: {counts}.")
    return sentences


def _course(series: Series, unit: str) -> str:
    known = [value for value in series.values if value is not None]
    if not known:
        return f"{series.name}: nothing was measured."
    first, last, low, high = (format_value(value, unit) for value in (known[0], known[-1], min(known), max(known)))
    return f"{series.name}: from {first} to {last}, between {low} and {high}."


def bars_figure(bars: Bars) -> Figure:
    """Makes the figure of bars; its table holds them all."""
    rows = tuple(
        (name, *(format_value(each.values[index], bars.unit) for each in bars.series))
        for index, name in enumerate(bars.rows)
    )
    limits = [f"The line {name} is at {format_value(value, bars.unit)}." for name, value in bars.limits.items()]
    return Figure(
        key=bars.key,
        title=bars.title,
        summary=" ".join([*(_highest(each, bars) for each in bars.series), *limits]),
        columns=("", *(each.name for each in bars.series)),
        rows=rows,
        data={"kind": "bars", **codec.to_json(bars)},
    )


def _highest(series: Series, bars: Bars) -> str:
    known = [(value, index) for index, value in enumerate(series.values) if value is not None]
    if not known:
        return f"{series.name}: nothing is known."
    value, index = max(known)
    return f"{series.name} is highest in {bars.rows[index]}, at {format_value(value, bars.unit)}."


_WHOLE = "rehearsed step"


def timeline_figure(timeline: Timeline) -> Figure:
    """Makes the figure; its table holds the fullest moment of each stretch of a phase."""
    totals = [sum(column) for column in zip(*timeline.owners.values(), strict=True)]
    suffix = "" if timeline.name == _WHOLE else f", {timeline.name}"
    return Figure(
        key=f"memory {'' if timeline.name == _WHOLE else timeline.name}",
        title=f"Memory over the {_WHOLE}{suffix}",
        summary=_summary(timeline, totals),
        columns=("Phase", "Event", "Allocated", "Reserved", *map(_words, timeline.owners), "Largest holder"),
        rows=tuple(_timeline_row(timeline, totals, point) for point in _highest_of_phases(timeline, totals)),
        data=_packed(timeline),
    )


def _summary(timeline: Timeline, totals: list[int]) -> str:
    peak = timeline.peak
    sizes = sorted(((each[peak], _words(owner)) for owner, each in timeline.owners.items()), reverse=True)
    parts = ", ".join(f"{name} {format_bytes(size)}" for size, name in sizes[:3] if size)
    return (
        f"Allocated memory is highest in {_phase_at(timeline, peak) or 'the step'}, at {format_bytes(totals[peak])} "
        f"({parts}). torch reserves at most {format_bytes(max(timeline.reserved_bytes))} of a budget of "
        f"{format_bytes(timeline.budget_bytes)}. The rehearsal has {timeline.events:,} events, "
        f"of which {len(totals):,} are drawn; peaks are kept."
    )


def _highest_of_phases(timeline: Timeline, totals: list[int]) -> list[int]:
    """Chooses the fullest moment of each stretch of a phase, or of the fullest where there are many."""
    starts = [0, *(bisect_right(timeline.event, first - 1) for _, first in timeline.phases), len(totals)]
    highest = {max(range(first, end), key=totals.__getitem__) for first, end in pairwise(starts) if first < end}
    fullest = sorted(highest, key=totals.__getitem__, reverse=True)
    return sorted({timeline.peak, *fullest[:MOST_ROWS]})


def _timeline_row(timeline: Timeline, totals: list[int], point: int) -> tuple[str, ...]:
    return (
        _phase_at(timeline, point),
        f"{timeline.event[point]:,}",
        format_bytes(totals[point]),
        format_bytes(timeline.reserved_bytes[point]),
        *(format_bytes(each[point]) for each in timeline.owners.values()),
        *(_holder(timeline, each) for each in timeline.holders[point][:1] or (None,)),
    )


def _holder(timeline: Timeline, holder: Holder | None) -> str:
    if holder is None:
        return ""
    return f"{timeline.modules[holder.module] or '(no module)'}: {format_bytes(holder.size_bytes)}"


def _phase_at(timeline: Timeline, point: int) -> str:
    index = bisect_right([first for _, first in timeline.phases], timeline.event[point]) - 1
    return _words(timeline.phases[index][0]) if index >= 0 else ""


def _words(name: str) -> str:
    return str(name).replace("_", " ")


# -- columns, packed -----------------------------------------------------------------------------------------------


def _packed(timeline: Timeline) -> dict[str, Any]:
    """Packs the columns: most bytes stay as they are from one event to the next, and most holders come again."""
    numbers, sets = dict[tuple[int, int, int], int](), dict[tuple[int, ...], int]()
    holders_at = []
    for moment in timeline.holders:
        rows = [(each.module, each.owner, each.size_bytes) for each in moment]
        largest = tuple(numbers.setdefault(row, len(numbers)) for row in rows)
        holders_at.append(sets.setdefault(largest, len(sets)))
    return {
        "kind": "timeline",
        "events": timeline.events,
        "event": differences(timeline.event),
        "owners": [{"name": str(owner), "bytes": differences(each)} for owner, each in timeline.owners.items()],
        "reserved": differences(timeline.reserved_bytes),
        "modules": list(timeline.modules),
        "holders": list(numbers),
        "holderSets": list(sets),
        "holdersAt": holders_at,
        "phases": [[_words(phase), first] for phase, first in timeline.phases],
        "peak": timeline.peak,
        "budget": timeline.budget_bytes,
    }


def differences(values: Sequence[int]) -> list[int | tuple[int]]:
    """Writes a column as steps from value to value; ``(n,)`` stands for ``n`` steps of nothing.

    >>> differences([5, 5, 5, 5, 7])
    [5, (3,), 2]
    """
    steps = [*values[:1], *(after - before for before, after in pairwise(values))]
    packed: list[int | tuple[int]] = []
    for step, run in groupby(steps):
        count = sum(1 for _ in run)
        packed.extend([(count,)] if step == 0 else [step] * count)
    return packed
