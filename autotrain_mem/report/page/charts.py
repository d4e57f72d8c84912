"""Builds the charts of a page: phases side by side, a run over its time, and how long the rows are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from autotrain_mem.report import formatting
from autotrain_mem.types.data import PERCENTILES
from autotrain_mem.types.history import Moment, RunHistory
from autotrain_mem.types.mixed_lengths import STEPS
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
    yield from _image_tokens(material)
    yield from _over_steps(material)


def _of_run(material: Material, history: RunHistory) -> Iterator[Chart]:
    moments = _thinned(history.moments)
    if any(moment.device is not None for moment in moments):
        yield _memory(material, history, moments)
    if len(history.ranks) > 1:
        yield _ranks(history)
    for name, title in _LOGGED:
        read = _logged(name)
        if any(read(moment) is not None for moment in moments):
            yield _over_time(name, title.capitalize(), "", history, moments, [(title, read)])
    if any(moment.tokens_per_second for moment in moments):
        time = material.plan.estimate.time
        limits = {"predicted": time.tokens_per_second} if formatting.has_speed(time) else {}
        yield _over_time("speed", "Speed", "tokens/s", history, moments, [("tokens/s", _speed)], limits)


def _memory(material: Material, history: RunHistory, moments: list[Moment]) -> Chart:
    estimate = material.plan.estimate
    lines = [(name.removesuffix("_bytes").replace("_", " "), _device(name)) for name in _MEASURED]
    limits = {
        "budget": float(max(0, estimate.budget_bytes - estimate.outside_bytes)),
        "predicted peak reserved": float(estimate.reserved_bytes),
        "predicted peak allocated": float(estimate.reserved.peak_allocated_bytes),
    }
    return _over_time("memory", "Memory of the run", "bytes", history, moments, lines, limits)


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


def _over_time(
    key: str,
    title: str,
    unit: str,
    history: RunHistory,
    moments: list[Moment],
    lines: list[tuple[str, Read]],
    limits: Mapping[str, float] | None = None,
) -> Chart:
    marks = [Mark(seconds=each.seconds, step=each.step, kind=each.kind, text=each.text) for each in history.happenings]
    return Chart(
        key=key,
        title=title,
        x_title="seconds since the training began",
        y_title=title.lower(),
        unit=unit,
        x=tuple(moment.seconds for moment in moments),
        series=tuple(Series(name=name, values=tuple(map(read, moments))) for name, read in lines),
        limits=limits or {},
        marks=tuple(marks),
    )


def _logged(name: str) -> Read:
    return lambda moment: moment.logs.get(name)


def _device(name: str) -> Read:
    return lambda moment: None if moment.device is None else float(getattr(moment.device, name))


def _speed(moment: Moment) -> float | None:
    return moment.tokens_per_second


def _thinned(moments: tuple[Moment, ...]) -> list[Moment]:
    """Leaves out moments of a long run evenly, but for those that reserved most in their stretch."""
    if len(moments) <= SHOWN_MOMENTS:
        return list(moments)
    chosen: set[int] = {0, len(moments) - 1}
    places = SHOWN_MOMENTS // 2
    for place in range(places):
        stretch = range(place * len(moments) // places, (place + 1) * len(moments) // places)
        chosen |= {stretch[-1], max(stretch, key=lambda index: _reserved(moments[index]))}
    return [moments[index] for index in sorted(chosen)]


def _reserved(moment: Moment) -> int:
    return 0 if moment.device is None else moment.device.reserved_bytes


def _lengths(material: Material) -> Iterator[Chart]:
    """Shows which share of the rows is no longer than a length: of all rows where that was kept, else of a few."""
    data, knobs = material.plan.data, material.plan.knobs
    if data is None:
        return
    if material.profile is not None and material.profile.rows:
        lengths = sorted(material.profile.rows_by_length)
        rows = accumulate(material.profile.rows_by_length[length] for length in lengths)
        shares = [count / material.profile.rows for count in rows]
    else:
        lengths, shares = [*data.percentiles, data.longest], [*PERCENTILES, 1.0]
    thin = max(1, len(lengths) // SHOWN_MOMENTS)
    lengths, shares = lengths[::-thin][::-1], shares[::-thin][::-1]  # the longest row stays
    longest = None if material.plan.job.is_online else knobs.max_length
    yield Chart(
        key="lengths",
        title="How long the rows are",
        x_title="tokens",
        y_title="share of the rows that are no longer",
        unit="share",
        x=tuple(map(float, lengths)),
        series=(Series(name="rows", values=tuple(shares)),),
        limits={},
        verticals=None if longest is None else {f"max_length {longest}": float(longest)},
        steps=True,
    )


def _image_tokens(material: Material) -> Iterator[Chart]:
    """Shows the same of the tokens that stand for images."""
    data, profile = material.plan.data, material.profile
    if data is None or data.images is None:
        return
    if profile is not None and profile.images is not None:
        tokens = sorted(profile.images.rows_by_image_tokens)
        rows = accumulate(profile.images.rows_by_image_tokens[each] for each in tokens)
        shares = [count / profile.rows for count in rows]
    else:
        tokens, shares = [*data.images.percentiles, data.images.most], [*PERCENTILES, 1.0]
    thin = max(1, len(tokens) // SHOWN_MOMENTS)
    yield Chart(
        key="images",
        title="How many tokens of a row are images",
        x_title="tokens",
        y_title="share of the rows that have no more",
        unit="share",
        x=tuple(map(float, tokens[::-thin][::-1])),
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
