"""Makes the figures with lines over a run and with bars: a sentence, a table, and the values as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotrain_mem.report.page.figures import Figure, format_value, spread
from autotrain_mem.types import codec

if TYPE_CHECKING:
    from autotrain_mem.types.page import Bars, Chart, Series


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
