"""Makes the content of a plan's or a run's page (figures, tables and texts), without styles."""

from collections.abc import Iterator, Sequence
from functools import partial

from autotrain_mem.report import formatting
from autotrain_mem.report.estimate_view import module_tables, scale_of, sum_table
from autotrain_mem.report.explain_view import attempts
from autotrain_mem.report.layout import add, table
from autotrain_mem.report.page.figures import TORCH_BUDGET, bar_figure, histogram_figure, line_figure, timeline_figure
from autotrain_mem.report.plan_view import gentler_levels, levels_table, plan_verdict, settings_table
from autotrain_mem.report.run_view import assessment, run_outcome
from autotrain_mem.support.units import brief, counted, format_bytes, rate
from autotrain_mem.types import REWARD_NAMES, DataProfile, Material, Page, Plan, Report, Section
from autotrain_mem.types.estimate import STEPS
from autotrain_mem.types.experience import StepReading

VERSION_DIGITS = 12
"""Digits shown of our own version, which is a digest."""
SHOWN_MOMENTS = 2000
"""The most points in a figure of a run, which is fewer pixels wide; each stretch of steps keeps its highest point."""
_LOGGED = {
    "loss": "loss",
    **dict.fromkeys(REWARD_NAMES, "reward"),
    "grad_norm": "norm of the gradient",
    "learning_rate": "learning rate",
}
"""Names in trainers' logs -> titles."""
_HOW_TO_READ = (
    "The first figure shows rehearsed training steps on the worst batch: the bytes of tensors, stacked by use, and the "
    "bytes reserved for them. The key figures are of a whole run, with rows of every length.",
    "Tensors lie in blocks, which torch counts as allocated, and which can be larger than the tensors. torch reserves "
    "bytes of the GPU for all blocks. With the memory outside torch, they must fit the card's budget.",
)
_PREDICTED = "Everything here is predicted: nothing has been loaded or trained."
_MEASURED_TOO = "What the run measured is shown beside its prediction."


def page_of(material: Material) -> Page:
    """Returns the page of a plan, and of the run that trained with it, if any."""
    plan, report, history = material.plan, material.report, material.history
    is_run, has_finished = report is not None or history is not None, plan.estimate.fits
    verdict = str(plan_verdict(plan))
    if history is not None and (report is None or history.ending not in ("finished", "interrupted")):
        step = history.moments[-1].step if history.moments else 0
        verdict, has_finished = f"{history.ending or 'not ended'} at step {step} of {history.total_steps}", False
    elif report is not None:
        ending = "finished" if history is None else history.ending
        has_finished = ending == "finished" and report.not_finite_step is None
        verdict = run_outcome(report, ending)
    # without digests of files, which have a space in their names
    installed = {name: version for name, version in plan.versions.items() if version and " " not in name}
    return Page(
        title=f"{plan.model}, {plan.method}, on {formatting.cards(plan.estimate.hardware)}",
        verdict=verdict,
        assessment=() if history is None else assessment(plan, history),
        is_good=has_finished,
        command=material.command,
        made=material.made,
        versions=installed | {"autotrain_mem": installed.get("autotrain_mem", "")[:VERSION_DIGITS]},
        how_to_read=(*_HOW_TO_READ, _MEASURED_TOO if is_run else _PREDICTED),
        key_figures=tuple(_key_figures(plan, report)),
        sections=(*figures(material), *tables(material)),
        not_shown=material.not_shown,
    )


def _key_figures(plan: Plan, report: Report | None) -> list[tuple[str, str, str]]:
    """Returns the name, the value and the comparison of each key number."""
    estimate, knobs = plan.estimate, plan.knobs
    budget = f"of the card's budget of {format_bytes(estimate.budget_bytes)}{estimate.segments}"
    figures = [("needed", format_bytes(estimate.required_bytes), budget)]
    for name, size, error in (
        ("allocated", estimate.reserved.peak_allocated_bytes, None if report is None else report.prediction_error),
        ("reserved", estimate.reserved_bytes, None if report is None else report.reserved_prediction_error),
    ):
        note = "predicted"
        if report is not None and report.measured is not None:
            note += f"; measured {format_bytes(getattr(report.measured, f'peak_{name}_bytes'))}"
            note += "" if error is None else f" ({100 * error:+.1f} %)"
        figures.append((f"peak {name}", format_bytes(size), note))
    if formatting.has_speed(estimate.time):
        step = brief(estimate.time.step_seconds)
        figures.append(("speed", f"{rate(estimate.time.tokens_per_second)} tokens/s", f"{step} a step"))
    if plan.optimizer_steps is not None and (run := formatting.run_time(plan)):
        figures.append(("time", run, f"predicted for {counted(plan.optimizer_steps, 'step')}"))
    figures.append(("batch", str(knobs.effective_batch_size), f"{formatting.batch(knobs)}: micro-batch x accumulation"))
    figures.append(("level of harm", plan.level, formatting.LEVELS.get(plan.level, "")))
    return figures


def figures(material: Material) -> Iterator[Section]:
    """Yields the figures: the rehearsed step, the run, row lengths, memory reserved over many steps, and phases."""
    plan, history, estimate = material.plan, material.history, material.plan.estimate
    if material.timeline is not None:
        yield timeline_figure(material.timeline)
    if history is not None:
        yield from _run_figures(material)
    if (profile := material.profile) is not None and profile.rows:
        yield histogram_figure("lengths", "How long the rows are", profile, plan.job.row_limit(plan.knobs))
        if profile.images is not None:
            images = DataProfile(rows_by_length=profile.images.rows_by_image_tokens)
            yield histogram_figure("images", "Image tokens of a row", images, None)
    if (mixed := estimate.mixed) is not None:
        yield line_figure(
            "hours",
            "Predicted reserved memory after many steps with rows of every length",
            "optimizer steps",
            STEPS,
            {"longest rows first": mixed},
            y_title="reserved",
            unit="bytes",
            limits={TORCH_BUDGET: float(estimate.reservable_bytes)},
        )
    phases = estimate.memory.phases
    probes = [probe.phases for probe in plan.experience.probes if probe.knobs == plan.knobs and probe.phases]
    peaks: dict[str, Sequence[float | None]] = {"tensors, predicted": [*map(float, phases.values())]}
    for name, measured in (
        ("allocated, probe", probes[-1:]),
        ("allocated, run", [history.phases] if history is not None else []),
    ):
        for each in filter(None, measured):
            peaks[name] = [float(each[phase].allocated_bytes) if phase in each else None for phase in phases]
    groups = [formatting.PHASES[phase] for phase in phases]
    yield bar_figure("phases", "Peak of each phase", groups, peaks, "bytes")


def _run_figures(material: Material) -> Iterator[Section]:
    """Yields figures of memory, of each rank's peaks, of logged values and of speed, as far as they were measured."""
    history, estimate = material.history, material.plan.estimate
    assert history is not None, "figures() asks for these only of a run"
    moments = _thinned(history.moments)
    over_time = partial(
        line_figure,
        axis="seconds since the training began",
        x=[moment.seconds for moment in moments],
        happened=history.happenings,
    )
    if any(devices := [moment.device for moment in moments]):
        lines: dict[str, list[float | None]] = {
            name.removesuffix("_bytes").replace("_", " "): [
                None if device is None else float(getattr(device, name)) for device in devices
            ]
            for name in ("peak_reserved_bytes", "reserved_bytes", "peak_allocated_bytes", "allocated_bytes")
        }
        limits = {
            TORCH_BUDGET: float(estimate.reservable_bytes),
            "predicted peak reserved": float(estimate.reserved_bytes),
            "predicted peak allocated": float(estimate.reserved.peak_allocated_bytes),
        }
        title = "Memory of the run"
        yield over_time("memory-of-the-run", title, lines=lines, y_title=title, unit="bytes", limits=limits)
    if len(history.ranks) > 1:  # by step, since the clocks of several machines need not agree
        ranks = [
            {moment.step: float(moment.device.peak_reserved_bytes) for moment in rank if moment.device is not None}
            for rank in history.ranks
        ]
        steps = sorted({step for rank in ranks for step in rank})
        of_ranks = {f"rank {number}": [rank.get(step) for step in steps] for number, rank in enumerate(ranks)}
        title = "Peak reserved of each rank"
        if steps:
            yield line_figure("ranks", title, "step", steps, of_ranks, y_title="reserved", unit="bytes")
    for name, words in _LOGGED.items():
        logged = [moment.logs.get(name) for moment in moments]
        if any(value is not None for value in logged):
            yield over_time(name.replace("/", "-"), words.capitalize(), lines={words: logged}, y_title=words)
    if any(speeds := [moment.tokens_per_second for moment in moments]):
        limits = {"predicted speed": estimate.time.tokens_per_second} if formatting.has_speed(estimate.time) else {}
        yield over_time("speed", "Speed", lines={"speed": speeds}, y_title="speed", unit="tokens/s", limits=limits)


def _thinned(moments: tuple[StepReading, ...]) -> list[StepReading]:
    """Thins the moments of a long run evenly; each stretch keeps the moment with the most reserved memory."""
    if len(moments) <= SHOWN_MOMENTS:
        return list(moments)
    reserved = [0 if moment.device is None else moment.device.reserved_bytes for moment in moments]
    chosen: set[int] = {0, len(moments) - 1}
    places = SHOWN_MOMENTS // 2
    for place in range(places):
        stretch = range(place * len(moments) // places, (place + 1) * len(moments) // places)
        chosen |= {stretch[-1], max(stretch, key=reserved.__getitem__)}
    return [moments[index] for index in sorted(chosen)]


def tables(material: Material) -> Iterator[Section]:
    """Yields the tables that have rows, most of them as in the terminal."""
    plan = material.plan
    changed = table("setting", "from", "to", "what it costs", "why")
    for lever in sorted(plan.levers, key=lambda each: each.harm):
        values = formatting.value(lever.before), formatting.value(lever.after)
        add(changed, lever.name, *values, formatting.HARMS[lever.harm], lever.why)
    uncounted = table("", show_header=False)
    for sentence in (*plan.warnings, *plan.estimate.memory.not_counted):
        add(uncounted, sentence)
    incidents = table("after step", "what", "where", "what was done", right=(0,))
    for each in plan.experience.incidents:
        add(incidents, str(each.step), "out of memory", each.phase.replace("_", " "), each.remedy)
    for restart in plan.experience.restarts:
        add(incidents, str(restart.step), "restart", restart.cause, restart.change or "the same settings")
    peak = f"Where the bytes are at the peak, in {scale_of(plan.estimate).unit}"
    units, attempts_table, legend = attempts(plan)
    tried = [f"Each was rehearsed; {units}", *(f"{sign} {meaning}".strip() for sign, meaning in legend)]
    every = [
        ("changes", "What was changed", "Least harm first; a setting that you gave is never changed.", changed),
        ("attempts", "What was tried", "; ".join(tried), attempts_table),
        ("levels", "Other levels of harm", "; ".join(gentler_levels(plan)), levels_table(plan)),
        ("settings", "Settings", "A star marks what differs from TRL's default.", settings_table(plan)),
        ("peak", peak, "", sum_table(plan.estimate)),
        *((key, heading.capitalize(), "", grid) for key, heading, grid in module_tables(plan.estimate)),
        ("incidents", "What the run survived", "", incidents),
        ("not-counted", "Warnings, and what the prediction does not count", "", uncounted),
    ]
    for key, title, note, grid in every:
        if not grid.rows:
            continue
        lines = zip(*(column.cells for column in grid.columns), strict=True)
        yield Section(
            key=key,
            title=title,
            note=note,
            columns=tuple(str(column.header) for column in grid.columns),
            rows=tuple(tuple(str(cell) for cell in row) for row in lines),
            right=tuple(at for at, column in enumerate(grid.columns) if column.justify == "right"),
            strong=tuple(at for at, row in enumerate(grid.rows) if row.style == "bold"),
        )
