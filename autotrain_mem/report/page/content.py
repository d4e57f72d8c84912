"""Decides every word and table on the page of a plan or a run, and nothing of how it looks."""

from __future__ import annotations

from collections.abc import Iterator

from autotrain_mem.report import formatting
from autotrain_mem.report.page.charts import bars, charts
from autotrain_mem.report.plan_view import plan_verdict
from autotrain_mem.settings.knobs import NOT_TRLS, knob_names
from autotrain_mem.support.units import brief, counted, duration, format_bytes, money, rate
from autotrain_mem.types import Plan, Report
from autotrain_mem.types.methods_table import METHODS
from autotrain_mem.types.page import Grid, Material, Page

DIGITS = 12
"""Of our own version, which is a digest: enough to tell it from others."""
_HOW_TO_READ = (
    "The first figure is one rehearsed training step on the worst batch: what is allocated, stacked by what it is for, "
    "the memory reserved for it, and the budget that neither may pass.",
    "Allocated bytes belong to tensors; reserved bytes are what torch's allocator takes from the GPU to serve them, "
    "and those, with what lies outside torch, must fit.",
)
_OF_A_PLAN = "Everything here is predicted: nothing has been loaded or trained."
_OF_A_RUN = "Where a run has measured the same thing, its figure stands beside the prediction."


def page_of(material: Material) -> Page:
    """Returns the page of a plan, with the run that trained by it where there is one."""
    plan = material.plan
    is_run = material.report is not None or material.history is not None
    # digests of files, which only a cache needs, are left out
    installed = {name: version for name, version in plan.versions.items() if version and " " not in name}
    return Page(
        title=f"{plan.model}, {plan.method}, on {formatting.cards(plan.estimate.hardware)}",
        verdict=str(plan_verdict(plan)),
        fits=plan.estimate.fits,
        command=material.command,
        made=material.made,
        versions=installed | {"autotrain_mem": installed.get("autotrain_mem", "")[:DIGITS]},
        how_to_read=(*_HOW_TO_READ, _OF_A_RUN if is_run else _OF_A_PLAN),
        key_figures=tuple(_key_figures(plan, material.report)),
        timelines=material.timelines,
        charts=tuple(charts(material)),
        bars=tuple(bars(material)),
        grids=tuple(grids(material)),
        not_shown=material.not_shown,
    )


def _key_figures(plan: Plan, report: Report | None) -> list[tuple[str, str, str]]:
    """Lists what a reader looks for first: name, value, and what it is to be held against."""
    estimate, knobs = plan.estimate, plan.knobs
    budget = f"of a budget of {format_bytes(estimate.budget_bytes)}"
    figures = [("needed", format_bytes(estimate.required_bytes), budget)]
    allocated, reserved = estimate.reserved.peak_allocated_bytes, estimate.reserved_bytes
    figures += [
        ("peak allocated", format_bytes(allocated), _measured(report, reserved=False)),
        ("peak reserved", format_bytes(reserved), _measured(report, reserved=True)),
    ]
    if formatting.has_speed(estimate.time):
        step = brief(estimate.time.step_seconds)
        figures.append(("speed", f"{rate(estimate.time.tokens_per_second)} tokens/s", f"{step} a step"))
    if plan.run_seconds is not None and plan.optimizer_steps is not None:
        steps = counted(plan.optimizer_steps, "step")
        figures.append(("time", duration(plan.run_seconds), f"predicted for {steps}"))
    if report is not None and report.has_trained:
        steps = counted(report.steps - report.began_at, "step")
        figures.append(("trained", duration(report.seconds), steps))
        if report.first_loss is not None and report.last_loss is not None:
            figures.append(("loss", f"{report.last_loss:#.4g}", f"from {report.first_loss:#.4g}"))
    figures.append(("batch", str(knobs.effective_batch_size), f"{formatting.batch(knobs)}: at once x accumulation"))
    figures.append(("level of harm", plan.level, formatting.LEVELS.get(plan.level, "")))
    return figures


def _measured(report: Report | None, *, reserved: bool) -> str:
    if report is None or report.measured is None:
        return "predicted"
    measured = report.measured.peak_reserved_bytes if reserved else report.measured.peak_allocated_bytes
    error = report.reserved_prediction_error if reserved else report.prediction_error
    return f"predicted; measured {format_bytes(measured)}" + ("" if error is None else f" ({100 * error:+.1f} %)")


def grids(material: Material) -> Iterator[Grid]:
    """Yields the tables in their order; one with no rows is left out."""
    plan = material.plan
    every = (
        _changed(plan),
        _attempts(plan),
        _levels(plan),
        _settings(plan),
        _at_the_peak(plan),
        _cards(material),
        _incidents(plan),
        Grid(
            key="not-counted",
            title="Warnings, and what the prediction does not count",
            note="",
            columns=("",),
            rows=tuple((sentence,) for sentence in (*plan.warnings, *plan.estimate.memory.not_counted)),
        ),
    )
    yield from (grid for grid in every if grid.rows)


def _changed(plan: Plan) -> Grid:
    rows = []
    for lever in sorted(plan.levers, key=lambda each: each.harm):
        values = formatting.value(lever.before), formatting.value(lever.after)
        rows.append((lever.name, *values, formatting.HARMS[lever.harm], lever.why))
    note = "Least harm first; a setting that you gave is never changed."
    columns = ("setting", "from", "to", "what it costs", "why")
    return Grid(key="changes", title="What was changed", note=note, columns=columns, rows=tuple(rows))


def _attempts(plan: Plan) -> Grid:
    """Lists every configuration that the search rehearsed, in the order in which it was tried."""
    first = plan.attempts[0].knobs if plan.attempts else plan.knobs
    chosen = [at for at, each in enumerate(plan.attempts) if each.knobs == plan.knobs]
    rows = []
    for number, each in enumerate(plan.attempts, start=1):
        speed = rate(each.tokens_per_second) if each.fits and each.tokens_per_second else ""
        layers = "whole" if each.rehearsed_layers is None else counted(each.rehearsed_layers, "layer")
        checkpointing = "on" if each.knobs.recomputes else "off"
        settings = formatting.difference(each.knobs, first)
        needs = format_bytes(each.required_bytes)
        fits = "fits" if each.fits else "does not fit"
        rows.append((str(number), formatting.batch(each.knobs), checkpointing, settings, layers, needs, fits, speed))
    return Grid(
        key="attempts",
        title="What was tried",
        note=f"Each was rehearsed and held against the budget of {format_bytes(plan.estimate.budget_bytes)}.",
        columns=("", "batch", "checkpointing", "settings", "model", "needs", "", "tokens/s"),
        rows=tuple(rows),
        right=(0, 5, 7),
        strong=tuple(chosen[-1:]),
    )


def _levels(plan: Plan) -> Grid:
    rows = []
    for each in plan.alternatives:
        speed = f"{each.ratio:.2f} x" if each.ratio is not None else ""
        would_fit = f"; would on {', '.join(each.would_fit)}" if each.would_fit else ""
        where = "fits" if each.fits else f"does not fit{would_fit}"
        settings = f"{formatting.batch(each.knobs)}, {formatting.difference(each.knobs, plan.defaults)}"
        rows.append((each.level, format_bytes(each.required_bytes), where, speed, settings))
    return Grid(
        key="levels",
        title="Other levels of harm",
        note=f"The plan is of the level {plan.level}; speeds are relative to it.",
        columns=("level", "needs", "", "speed", "settings"),
        rows=tuple(rows),
        right=(1, 3),
    )


def _settings(plan: Plan) -> Grid:
    rows: list[tuple[str, ...]] = []
    strong: list[int] = []
    for name in knob_names(METHODS[plan.method].knobs, plan.knobs):
        chosen, default = getattr(plan.knobs, name), getattr(plan.defaults, name)
        is_ours = name in NOT_TRLS
        if chosen != default:
            strong.append(len(rows))
        rows.append((name, formatting.value(chosen), "none" if is_ours else formatting.value(default)))
    return Grid(
        key="settings",
        title="Settings",
        note="Rows that stand out differ from TRL's default.",
        columns=("setting", "value", "TRL's default"),
        rows=tuple(rows),
        strong=tuple(strong),
    )


def _at_the_peak(plan: Plan) -> Grid:
    """Lists where the bytes are at the peak: by owner, then the modules that hold most of what comes and goes."""
    estimate, memory = plan.estimate, plan.estimate.memory
    sizes = [(formatting.OWNERS[owner], "", size) for owner, size in memory.owners_at_peak.items() if size]
    sizes += [("of which activations and temporary", module, size) for module, size in memory.modules_at_peak]
    sizes += [("cached by the allocator", "", estimate.cached_bytes), ("outside torch", "", estimate.outside_bytes)]
    return Grid(
        key="peak",
        title=f"Where the bytes are at the peak, in the {formatting.PHASES[memory.peak_phase]} phase",
        note="",
        columns=("owner", "module", "bytes"),
        rows=tuple((owner, module, format_bytes(size)) for owner, module, size in sizes),
        right=(2,),
    )


def _cards(material: Material) -> Grid:
    """Lists known cards with the same kernels: whether these settings fit, and what they are rented for."""
    plan = material.plan
    count = plan.knobs.processes
    rows: list[tuple[str, ...]] = []
    strong: list[int] = []
    for offer in sorted(material.cards, key=lambda each: (not each.fits, each.hardware.total_bytes)):
        name, price = offer.hardware.name, offer.price
        if name == plan.estimate.hardware.name:
            strong.append(len(rows))
        sizes = (offer.hardware.total_bytes, offer.required_bytes, offer.budget_bytes)
        hourly = "" if price is None else money(price.per_hour * count, price.currency)
        seen = "" if price is None else ", ".join(filter(None, [price.provider, price.seen]))
        fits = "fits" if offer.fits else "does not fit"
        rows.append((name if count == 1 else f"{count} x {name}", *map(format_bytes, sizes), fits, hourly, seen))
    return Grid(
        key="cards",
        title="These settings on other cards",
        note="Cards that run the same kernels; prices are dated listings and move.",
        columns=("card", "memory", "needs", "budget", "", "price an hour", "seen"),
        rows=tuple(rows),
        right=(1, 2, 3, 5),
        strong=tuple(strong),
    )


def _incidents(plan: Plan) -> Grid:
    """Lists how often the device was full, and where another process went on."""
    incidents, restarts = plan.experience.incidents, plan.experience.restarts
    rows = [(str(each.step), "out of memory", each.phase.replace("_", " "), each.remedy) for each in incidents]
    rows += [(str(each.step), "restart", each.cause, each.change or "the same settings") for each in restarts]
    return Grid(
        key="incidents",
        title="What the run survived",
        note="",
        columns=("after step", "what", "where", "what was done"),
        rows=tuple(rows),
        right=(0,),
    )
