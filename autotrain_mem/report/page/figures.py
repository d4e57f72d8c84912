"""Builds the figures of a page, each with a sentence, a table in its place, and what the script draws."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

from autotrain_mem.report import formatting
from autotrain_mem.support import codec
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types.data import PERCENTILES
from autotrain_mem.types.estimate import STEPS
from autotrain_mem.types.experience import RunHistory, RunMarker, StepReading
from autotrain_mem.types.page import Material, Section, Timeline
from autotrain_mem.types.report import REWARD_NAMES

MOST_ROWS = 60
"""Of the table that stands in a figure's place, about."""
SHOWN_MOMENTS = 2000
"""Of a run, at most, each with its highest: more than a figure has pixels."""
_LOGGED = {
    "loss": "loss",
    **dict.fromkeys(REWARD_NAMES, "reward"),
    "grad_norm": "norm of the gradient",
    "learning_rate": "learning rate",
}
"""What trainers log, and how it is called here."""
_MEASURED = ("peak_reserved_bytes", "reserved_bytes", "peak_allocated_bytes", "allocated_bytes")

Lines = Mapping[str, Sequence[float | None]]
"""Values by the name of a line; None where nothing was measured."""
Limits = Mapping[str, float]
"""Places of horizontal or vertical lines by their names."""


def figures(material: Material) -> Iterator[Section]:
    """Yields the rehearsed steps, the figures over a run's time, lengths and steps, and the phases."""
    if material.timeline is not None:
        yield timeline_figure(material.timeline)
    if material.history is not None:
        yield from _of_run(material, material.history)
    yield from _lengths(material)
    yield from _over_steps(material)
    yield _phases(material)


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


# -- shapes of figures -------------------------------------------------------------------------------------------------


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
    verticals: Limits | None = None,
    happened: Sequence[RunMarker] = (),
    steps: bool = False,
) -> Section:
    """Draws lines over a common axis; the table holds some points, and every mark.

    Args:
        axis: What ``x`` is, which ascends: seconds, steps or tokens.
        unit: Of the values: ``bytes``, ``tokens/s``, or empty for a plain number.
        happened: What is marked on an axis of seconds.
        steps: A value holds until the next, as of a distribution, in place of a straight line between them.
    """

    def place(value: float) -> str:
        if "second" not in axis:
            return format_value(value, "")
        minutes, seconds = divmod(round(value), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"

    shown = sorted({*range(0, len(x), max(1, -(-len(x) // MOST_ROWS))), len(x) - 1})
    sentences = [*_line_sentences(lines, unit), *_sentences(limits, unit)]
    sentences += [f"{name} is at {format_value(value, '')}." for name, value in (verticals or {}).items()]
    if kinds := [each.kind for each in happened]:
        counts = ", ".join(f"{kind} ({kinds.count(kind)})" for kind in dict.fromkeys(kinds))
        sentences.append(f"Marked are: {counts}.")
    no_mark = ("",) if happened else ()
    rows = [(x[at], tuple(format_value(each[at], unit) for each in lines.values()) + no_mark) for at in shown]
    blank = [""] * len(lines)
    rows += [(each.seconds, (*blank, f"{each.kind}, step {each.step:,}: {each.text}")) for each in happened]
    drawn: dict[str, Any] = {
        "kind": "chart",
        "x_title": axis,
        "y_title": y_title,
        "unit": unit,
        "x": list(x),
        "series": _series(lines),
        "limits": dict(limits or {}),
        "marks": codec.to_json(tuple(happened)),
        "verticals": dict(verticals or {}),
        "steps": steps,
    }
    return Section(
        key=key,
        title=title,
        note=" ".join(sentences),
        columns=(axis, *lines, *(["Incident"] if happened else [])),
        rows=tuple((place(at), *cells) for at, cells in sorted(rows, key=lambda row: row[0])),
        figure=drawn,
    )


def _line_sentences(lines: Lines, unit: str) -> Iterator[str]:
    for name, values in lines.items():
        if known := [value for value in values if value is not None]:
            ends = (format_value(value, unit) for value in (known[0], known[-1], min(known), max(known)))
            yield "{}: from {} to {}, between {} and {}.".format(name, *ends)
        else:
            yield f"{name}: nothing was measured."


def bar_figure(key: str, title: str, groups: Sequence[str], lines: Lines, unit: str, limits: Limits) -> Section:
    """Draws a group of bars for each name, one of each line; the table holds them all."""
    sentences = []
    for name, values in lines.items():
        known = [(value, group) for value, group in zip(values, groups, strict=True) if value is not None]
        if not known:
            sentences.append(f"{name}: nothing is known.")
            continue
        value, highest = max(known)
        sentences.append(f"{name} is highest in {highest}, at {format_value(value, unit)}.")
    rows = zip(groups, *([format_value(value, unit) for value in values] for values in lines.values()), strict=True)
    return Section(
        key=key,
        title=title,
        note=" ".join([*sentences, *_sentences(limits, unit)]),
        columns=("", *lines),
        rows=tuple(rows),
        figure={"kind": "bars", "unit": unit, "rows": list(groups), "series": _series(lines), "limits": dict(limits)},
    )


def _series(lines: Lines) -> list[dict[str, Any]]:
    return [{"name": name, "values": list(values)} for name, values in lines.items()]


def _sentences(limits: Limits | None, unit: str) -> list[str]:
    return [f"The line {name} is at {format_value(value, unit)}." for name, value in (limits or {}).items()]


# -- the rehearsed step ------------------------------------------------------------------------------------------------


def timeline_figure(timeline: Timeline) -> Section:
    """Draws memory event by event; the table holds the fullest moment of each stretch of a phase."""
    totals = [sum(column) for column in zip(*timeline.owners.values(), strict=True)]
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
        cells = (format_bytes(column[point]) for column in columns)
        rows.append((_phase_at(timeline, point), f"{timeline.event[point]:,}", *cells, holder))
    return Section(
        key="memory",
        title=f"Memory over the {timeline.name}",
        note=summary,
        columns=("Phase", "Event", "Allocated", "Reserved", *map(_words, timeline.owners), "Largest holder"),
        rows=tuple(rows),
        figure=_packed(timeline),
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


# -- the run, the rows and the phases ----------------------------------------------------------------------------------


def _of_run(material: Material, history: RunHistory) -> Iterator[Section]:
    moments, estimate = _thinned(history.moments), material.plan.estimate
    over_time = partial(
        line_figure,
        axis="seconds since the training began",
        x=[moment.seconds for moment in moments],
        happened=history.happenings,
    )
    if any(moment.device is not None for moment in moments):
        lines = {
            _words(name.removesuffix("_bytes")): [
                None if moment.device is None else float(getattr(moment.device, name)) for moment in moments
            ]
            for name in _MEASURED
        }
        limits = {
            "budget": float(estimate.reservable_bytes),
            "predicted peak reserved": float(estimate.reserved_bytes),
            "predicted peak allocated": float(estimate.reserved.peak_allocated_bytes),
        }
        title = "Memory of the run"
        yield over_time("memory-of-the-run", title, lines=lines, y_title=title.lower(), unit="bytes", limits=limits)
    if len(history.ranks) > 1:
        yield _ranks(history)
    for name, words in _LOGGED.items():
        logged = [moment.logs.get(name) for moment in moments]
        if any(value is not None for value in logged):
            yield over_time(name.replace("/", "-"), words.capitalize(), lines={words: logged}, y_title=words)
    speeds = [moment.tokens_per_second for moment in moments]
    if any(speeds):
        limits = {"predicted": estimate.time.tokens_per_second} if formatting.has_speed(estimate.time) else {}
        yield over_time("speed", "Speed", lines={"tokens/s": speeds}, y_title="speed", unit="tokens/s", limits=limits)


def _ranks(history: RunHistory) -> Section:
    """Shows the peak reserved of every process, by step: clocks of several machines need not agree."""
    steps = sorted({moment.step for rank in history.ranks for moment in rank if moment.device is not None})
    lines = dict[str, list[float | None]]()
    for number, rank in enumerate(history.ranks):
        at = {moment.step: float(moment.device.peak_reserved_bytes) for moment in rank if moment.device is not None}
        lines[f"rank {number}"] = [at.get(step) for step in steps]
    return line_figure("ranks", "Peak reserved of each rank", "step", steps, lines, y_title="reserved", unit="bytes")


def _thinned(moments: tuple[StepReading, ...]) -> list[StepReading]:
    """Leaves out moments of a long run evenly, but for those that reserved most in their stretch."""
    if len(moments) <= SHOWN_MOMENTS:
        return list(moments)
    reserved = [0 if moment.device is None else moment.device.reserved_bytes for moment in moments]
    chosen: set[int] = {0, len(moments) - 1}
    places = SHOWN_MOMENTS // 2
    for place in range(places):
        stretch = range(place * len(moments) // places, (place + 1) * len(moments) // places)
        chosen |= {stretch[-1], max(stretch, key=lambda index: reserved[index])}
    return [moments[index] for index in sorted(chosen)]


def _lengths(material: Material) -> Iterator[Section]:
    """Shows which share of the rows is no longer than a length: of all rows where that was kept, else of a few; and
    the same of the tokens that stand for images."""
    data, profile = material.plan.data, material.profile
    if data is None:
        return
    counts = profile.rows_by_length if profile is not None and profile.rows else None
    longest = material.plan.job.row_limit(material.plan.knobs)
    limit = {} if longest is None else {f"max_length {longest}": float(longest)}
    few = (*data.percentiles, data.longest)
    yield _distribution("lengths", "How long the rows are", "are no longer", counts, few, limit)
    if data.images is not None:
        counts = profile.images.rows_by_image_tokens if profile is not None and profile.images is not None else None
        few = (*data.images.percentiles, data.images.most)
        yield _distribution("images", "How many tokens of a row are images", "have no more", counts, few, {})


def _distribution(
    key: str, title: str, no_more: str, counts: Mapping[int, int] | None, few: Sequence[int], verticals: Limits
) -> Section:
    """Draws shares of rows over tokens.

    Args:
        counts: Rows by their tokens; None where that was not kept.
        few: The tokens at ``PERCENTILES``, and the most.
    """
    tokens, shares = [*few], [*PERCENTILES, 1.0]
    if counts is not None:
        tokens, rows = sorted(counts), sum(counts.values())
        shares = [count / rows for count in accumulate(counts[each] for each in tokens)]
    thin = max(1, len(tokens) // SHOWN_MOMENTS)
    return line_figure(
        key,
        title,
        "tokens",
        tokens[::-thin][::-1],  # the longest row stays
        {"rows": shares[::-thin][::-1]},
        y_title=f"share of the rows that {no_more}",
        unit="share",
        verticals=verticals,
        steps=True,
    )


def _over_steps(material: Material) -> Iterator[Section]:
    """Shows what rows of every length make the allocator reserve, step after step."""
    estimate = material.plan.estimate
    if (mixed := estimate.mixed) is None:
        return
    orders = {"longest rows first": mixed.longest_first, "in any order": mixed.any_order}
    count = min(len(STEPS), *(len(order.reserved_bytes) for order in orders.values()))
    yield line_figure(
        "hours",
        "Reserved after many steps of rows of every length, predicted",
        "optimizer steps",
        STEPS[:count],
        {name: order.reserved_bytes[:count] for name, order in orders.items()},
        y_title="reserved",
        unit="bytes",
        limits={"budget": float(estimate.reservable_bytes)},
    )


def _phases(material: Material) -> Section:
    """Shows what each phase takes at most, as predicted, probed and trained."""
    plan, history = material.plan, material.history
    memory = plan.estimate.memory
    probes = [probe.phases for probe in plan.experience.probes if probe.knobs == plan.knobs and probe.phases]
    lines: dict[str, list[float | None]] = {"predicted": [float(size) for size in memory.phases.values()]}
    for name, measured in (("probe", probes[-1:]), ("run", [history.phases] if history is not None else [])):
        for peaks in filter(None, measured):
            sizes = {phase: float(peak.allocated_bytes) for phase, peak in peaks.items()}
            lines[name] = [sizes.get(phase) for phase in memory.phases]
    groups = [formatting.PHASES[phase] for phase in memory.phases]
    return bar_figure("phases", "Peak allocated in each phase", groups, lines, "bytes", {})
