"""Builds the charts of a page: phases side by side, a run over its time, and how long the rows are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from autotrain_mem.report import formatting
from autotrain_mem.types.data import PERCENTILES
from autotrain_mem.types.estimate import STEPS
from autotrain_mem.types.experience import Moment, RunHistory
from autotrain_mem.types.page import Bars, Chart, Mark, Material, Series
from autotrain_mem.types.report import REWARD_NAMES

SHOWN_MOMENTS = 2000
"""Of a run, at most, each with its highest: more than a figure has pixels."""
_LOGGED = (
    ("loss", "loss"),
    *((name, "reward") for name in REWARD_NAMES),
    ("grad_norm", "norm of the gradient"),
    ("learning_rate", "learning rate"),
)
"""What trainers log, and how it is called here."""
_MEASURED = ("peak_reserved_bytes", "reserved_bytes", "peak_allocated_bytes", "allocated_bytes")
Read = Callable[[Moment], float | None]
Lines = Sequence[tuple[str, Read]]


def bars(material: Material) -> Iterator[Bars]:
    """Yields what each phase takes at most, as predicted, probed and trained."""
    memory = material.plan.estimate.memory
    phases = list(memory.phases)
    series = [Series(name="predicted", values=tuple(float(memory.phases[phase]) for phase in phases))]
    probes = [probe for probe in material.plan.experience.probes if probe.knobs == material.plan.knobs and probe.phases]
    if probes:
        measured = {phase: float(peak.allocated_bytes) for phase, peak in probes[-1].phases.items()}
        series.append(Series(name="probe", values=tuple(measured.get(phase) for phase in phases)))
    if material.history is not None and material.history.phases:
        of_run = {phase: float(peak.allocated_bytes) for phase, peak in material.history.phases.items()}
        series.append(Series(name="run", values=tuple(of_run.get(phase) for phase in phases)))
    yield Bars(
        key="phases",
        title="Peak allocated in each phase",
        unit="bytes",
        rows=tuple(formatting.PHASES[phase] for phase in phases),
        series=tuple(series),
        limits={},
    )


def charts(material: Material) -> Iterator[Chart]:
    """Yields the figures over a run's time, then those over lengths and steps."""
    if material.history is not None:
        yield from _of_run(material, material.history)
    yield from _lengths(material)
    yield from _over_steps(material)


def _of_run(material: Material, history: RunHistory) -> Iterator[Chart]:
    moments, estimate = _thinned(history.moments), material.plan.estimate
    happened = history.happenings
    marks = tuple(Mark(seconds=each.seconds, step=each.step, kind=each.kind, text=each.text) for each in happened)

    def over_time(key: str, title: str, unit: str, lines: Lines, limits: Mapping[str, float] | None = None) -> Chart:
        return Chart(
            key=key,
            title=title,
            x_title="seconds since the training began",
            y_title=title.lower(),
            unit=unit,
            x=tuple(moment.seconds for moment in moments),
            series=tuple(Series(name=name, values=tuple(map(read, moments))) for name, read in lines),
            limits=limits or {},
            marks=marks,
        )

    if any(moment.device is not None for moment in moments):
        lines = [(name.removesuffix("_bytes").replace("_", " "), _device(name)) for name in _MEASURED]
        limits = {
            "budget": float(max(0, estimate.budget_bytes - estimate.outside_bytes)),
            "predicted peak reserved": float(estimate.reserved_bytes),
            "predicted peak allocated": float(estimate.reserved.peak_allocated_bytes),
        }
        yield over_time("memory", "Memory of the run", "bytes", lines, limits)
    if len(history.ranks) > 1:
        yield _ranks(history)
    for name, title in _LOGGED:
        if any(moment.logs.get(name) is not None for moment in moments):
            yield over_time(name, title.capitalize(), "", [(title, partial(_logged, name))])
    if any(moment.tokens_per_second for moment in moments):
        speed = {"predicted": estimate.time.tokens_per_second} if formatting.has_speed(estimate.time) else {}
        yield over_time("speed", "Speed", "tokens/s", [("tokens/s", lambda moment: moment.tokens_per_second)], speed)


def _logged(name: str, moment: Moment) -> float | None:
    return moment.logs.get(name)


def _device(name: str) -> Read:
    return lambda moment: None if moment.device is None else float(getattr(moment.device, name))


def _ranks(history: RunHistory) -> Chart:
    """Shows the peak reserved of every process, by step: clocks of several machines need not agree."""
    steps = sorted({moment.step for rank in history.ranks for moment in rank if moment.device is not None})
    series = []
    for number, rank in enumerate(history.ranks):
        at = {moment.step: float(moment.device.peak_reserved_bytes) for moment in rank if moment.device is not None}
        series.append(Series(name=f"rank {number}", values=tuple(at.get(step) for step in steps)))
    return Chart(
        key="ranks",
        title="Peak reserved of each rank",
        x_title="step",
        y_title="reserved",
        unit="bytes",
        x=tuple(map(float, steps)),
        series=tuple(series),
        limits={},
    )


def _thinned(moments: tuple[Moment, ...]) -> list[Moment]:
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


def _lengths(material: Material) -> Iterator[Chart]:
    """Shows which share of the rows is no longer than a length: of all rows where that was kept, else of a few; and
    the same of the tokens that stand for images."""
    data, profile = material.plan.data, material.profile
    if data is None:
        return
    counts = profile.rows_by_length if profile is not None and profile.rows else None
    few = (*data.percentiles, data.longest)
    lengths = _distribution("lengths", "How long the rows are", "are no longer", counts, few)
    longest = material.plan.job.row_limit(material.plan.knobs)
    yield lengths if longest is None else replace(lengths, verticals={f"max_length {longest}": float(longest)})
    if data.images is not None:
        counts = profile.images.rows_by_image_tokens if profile is not None and profile.images is not None else None
        few = (*data.images.percentiles, data.images.most)
        yield _distribution("images", "How many tokens of a row are images", "have no more", counts, few)


def _distribution(key: str, title: str, no_more: str, counts: Mapping[int, int] | None, few: Sequence[int]) -> Chart:
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
    return Chart(
        key=key,
        title=title,
        x_title="tokens",
        y_title=f"share of the rows that {no_more}",
        unit="share",
        x=tuple(map(float, tokens[::-thin][::-1])),  # the longest row stays
        series=(Series(name="rows", values=tuple(shares[::-thin][::-1])),),
        limits={},
        steps=True,
    )


def _over_steps(material: Material) -> Iterator[Chart]:
    """Shows what rows of every length make the allocator reserve, step after step."""
    estimate = material.plan.estimate
    mixed = estimate.mixed
    if mixed is None:
        return
    orders = (("longest rows first", mixed.longest_first), ("in any order", mixed.any_order))
    count = min(len(STEPS), *(len(order.reserved_bytes) for _, order in orders))
    yield Chart(
        key="hours",
        title="Reserved after many steps of rows of every length, predicted",
        x_title="optimizer steps",
        y_title="reserved",
        unit="bytes",
        x=tuple(map(float, STEPS[:count])),
        series=tuple(
            Series(name=name, values=tuple(map(float, order.reserved_bytes[:count]))) for name, order in orders
        ),
        limits={"budget": float(max(0, estimate.budget_bytes - estimate.outside_bytes))},
    )
