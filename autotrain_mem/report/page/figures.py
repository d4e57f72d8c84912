"""Makes of each figure of a page what its HTML holds: a sentence, a table, and what the script draws."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from autotrain_mem.support import codec
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types.page import Bars, Chart, Series, Timeline

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


def _known(series: Series) -> list[tuple[float, int]]:
    return [(value, index) for index, value in enumerate(series.values) if value is not None]


def chart_figure(chart: Chart) -> Figure:
    """Makes the figure of lines; its table holds some points, the extremes of each line, and every mark."""

    def place(value: float) -> str:
        """Writes seconds as a clock does, and any other place on the axis as a number."""
        if "second" not in chart.x_title:
            return format_value(value, "")
        minutes, seconds = divmod(round(value), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"

    extremes = {index for each in chart.series if (known := _known(each)) for _, index in (min(known), max(known))}
    blank, no_mark = ("",) * len(chart.series), ("",) if chart.marks else ()
    rows: list[tuple[float, tuple[str, ...]]] = []
    for point in spread(len(chart.x), extremes):
        values = (format_value(each.values[point], chart.unit) for each in chart.series)
        rows.append((chart.x[point], (place(chart.x[point]), *values, *no_mark)))
    for each in chart.marks:
        text = f"{each.kind}, step {each.step:,}: {each.text}"
        rows.append((each.seconds, (place(each.seconds), *blank, text)))
    return Figure(
        key=chart.key,
        title=chart.title,
        summary=" ".join(_sentences(chart)),
        columns=(chart.x_title, *(each.name for each in chart.series), *(["Incident"] if chart.marks else [])),
        rows=tuple(row for _, row in sorted(rows, key=lambda pair: pair[0])),
        data={"kind": "chart", **codec.to_json(chart)},
    )


def _sentences(chart: Chart) -> Iterator[str]:
    for each in chart.series:
        values = [value for value, _ in _known(each)]
        if not values:
            yield f"{each.name}: nothing was measured."
            continue
        figures = (values[0], values[-1], min(values), max(values))
        first, last, low, high = (format_value(value, chart.unit) for value in figures)
        yield f"{each.name}: from {first} to {last}, between {low} and {high}."
    yield from _limits(chart)
    yield from (f"{name} is at {format_value(value, '')}." for name, value in (chart.verticals or {}).items())
    if chart.marks:
        kinds = dict.fromkeys(mark.kind for mark in chart.marks)
        counts = ", ".join(f"{kind} ({sum(mark.kind == kind for mark in chart.marks)})" for kind in kinds)
        yield f"Marked are: {counts}."


def _limits(shown: Chart | Bars) -> Iterator[str]:
    yield from (f"The line {name} is at {format_value(value, shown.unit)}." for name, value in shown.limits.items())


def bars_figure(bars: Bars) -> Figure:
    """Makes the figure of bars; its table holds them all."""
    sentences = []
    for each in bars.series:
        value, index = max(_known(each), default=(0.0, -1))
        highest = f" is highest in {bars.rows[index]}, at {format_value(value, bars.unit)}."
        sentences.append(f"{each.name}{highest if index >= 0 else ': nothing is known.'}")
    rows = (
        (name, *(format_value(each.values[index], bars.unit) for each in bars.series))
        for index, name in enumerate(bars.rows)
    )
    return Figure(
        key=bars.key,
        title=bars.title,
        summary=" ".join([*sentences, *_limits(bars)]),
        columns=("", *(each.name for each in bars.series)),
        rows=tuple(rows),
        data={"kind": "bars", **codec.to_json(bars)},
    )


_WHOLE = "rehearsed step"


def timeline_figure(timeline: Timeline) -> Figure:
    """Makes the figure; its table holds the fullest moment of each stretch of a phase."""
    totals = [sum(column) for column in zip(*timeline.owners.values(), strict=True)]
    suffix = "" if timeline.name == _WHOLE else f", {timeline.name}"
    peak = timeline.peak
    sizes = sorted(((each[peak], _words(owner)) for owner, each in timeline.owners.items()), reverse=True)
    parts = ", ".join(f"{name} {format_bytes(size)}" for size, name in sizes[:3] if size)
    summary = (
        f"Allocated memory is highest in {_phase_at(timeline, peak) or 'the step'}, at {format_bytes(totals[peak])} "
        f"({parts}). torch reserves at most {format_bytes(max(timeline.reserved_bytes))} of a budget of "
        f"{format_bytes(timeline.budget_bytes)}. The rehearsal has {timeline.events:,} events, "
        f"of which {len(totals):,} are drawn; peaks are kept."
    )
    # the fullest moment of each stretch of a phase, or of the fullest where there are many
    starts = [0, *(bisect_right(timeline.event, first - 1) for _, first in timeline.phases), len(totals)]
    highest = {max(range(first, end), key=totals.__getitem__) for first, end in pairwise(starts) if first < end}
    fullest = sorted(highest, key=totals.__getitem__, reverse=True)
    rows = []
    for point in sorted({peak, *fullest[:MOST_ROWS]}):
        columns = [totals, timeline.reserved_bytes, *timeline.owners.values()]
        holder = ""
        for each in timeline.holders[point][:1]:
            holder = f"{timeline.modules[each.module] or '(no module)'}: {format_bytes(each.size_bytes)}"
        figures = (format_bytes(column[point]) for column in columns)
        rows.append((_phase_at(timeline, point), f"{timeline.event[point]:,}", *figures, holder))
    return Figure(
        key=f"memory {'' if timeline.name == _WHOLE else timeline.name}",
        title=f"Memory over the {_WHOLE}{suffix}",
        summary=summary,
        columns=("Phase", "Event", "Allocated", "Reserved", *map(_words, timeline.owners), "Largest holder"),
        rows=tuple(rows),
        data=_packed(timeline),
    )


def _phase_at(timeline: Timeline, point: int) -> str:
    index = bisect_right([first for _, first in timeline.phases], timeline.event[point]) - 1
    return _words(timeline.phases[index][0]) if index >= 0 else ""


def _words(name: str) -> str:
    return str(name).replace("_", " ")


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
