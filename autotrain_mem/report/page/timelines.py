"""Makes the figure of memory over the rehearsed step: a sentence, a table by phases, and packed columns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from autotrain_mem.report.page.figures import MOST_ROWS, Figure
from autotrain_mem.support.units import format_bytes

if TYPE_CHECKING:
    from autotrain_mem.types.page import Holder, Timeline

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
        rows=tuple(_row(timeline, totals, point) for point in _highest_of_phases(timeline, totals)),
        data=_data(timeline),
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


def _row(timeline: Timeline, totals: list[int], point: int) -> tuple[str, ...]:
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


def _data(timeline: Timeline) -> dict[str, Any]:
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
