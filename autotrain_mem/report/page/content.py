"""Decides every word and table on the page of a plan or a run, and nothing of how it looks."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from autotrain_mem.report import formatting
from autotrain_mem.report.estimate_view import module_tables, scale_of, sum_table
from autotrain_mem.report.explain_view import attempts_legend, attempts_table, attempts_units
from autotrain_mem.report.layout import add, table
from autotrain_mem.report.page.figures import figures
from autotrain_mem.report.plan_view import gentler_levels, levels_table, plan_verdict, settings_table
from autotrain_mem.support.units import brief, counted, duration, format_bytes, money, rate
from autotrain_mem.types import Plan, Report
from autotrain_mem.types.page import Material, Page, Section

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
        sections=(*figures(material), *tables(material)),
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


def tables(material: Material) -> Iterator[Section]:
    """Yields the tables in their order, those of the terminal among them; one with no rows is left out."""
    plan = material.plan
    changed = table("setting", "from", "to", "what it costs", "why")
    for lever in sorted(plan.levers, key=lambda each: each.harm):
        values = formatting.value(lever.before), formatting.value(lever.after)
        add(changed, lever.name, *values, formatting.HARMS[lever.harm], lever.why)
    uncounted = table("", show_header=False)
    for sentence in (*plan.warnings, *plan.estimate.memory.not_counted):
        add(uncounted, sentence)
    peak = f"Where the bytes are at the peak, in {scale_of(plan.estimate).unit}"
    tried = [f"Each was rehearsed; {attempts_units(plan)}"]
    tried += [f"{sign} {meaning}".strip() for sign, meaning in attempts_legend(plan)] if plan.attempts else []
    every = [
        ("changes", "What was changed", "Least harm first; a setting that you gave is never changed.", changed),
        ("attempts", "What was tried", "; ".join(tried), attempts_table(plan)),
        ("levels", "Other levels of harm", "; ".join(gentler_levels(plan)), levels_table(plan)),
        ("settings", "Settings", "A star marks what differs from TRL's default.", settings_table(plan)),
        ("peak", peak, "", sum_table(plan.estimate)),
        *((key, heading.capitalize(), "", grid) for key, heading, grid in module_tables(plan.estimate)),
        ("cards", "These settings on other cards", _CARDS_NOTE, _cards(material)),
        ("incidents", "What the run survived", "", _incidents(plan)),
        ("not-counted", "Warnings, and what the prediction does not count", "", uncounted),
    ]
    for key, title, note, grid in every:
        if not grid.rows:
            continue
        cells = zip(*(column.cells for column in grid.columns), strict=True)
        yield Section(
            key=key,
            title=title,
            note=note,
            columns=tuple(str(column.header) for column in grid.columns),
            rows=tuple(tuple(str(cell) for cell in row) for row in cells),
            right=tuple(at for at, column in enumerate(grid.columns) if column.justify == "right"),
            strong=tuple(at for at, row in enumerate(grid.rows) if row.style == "bold"),
        )


_CARDS_NOTE = "Cards that run the same kernels; prices are dated listings and move."


def _cards(material: Material) -> Table:
    """Lists known cards with the same kernels: whether these settings fit, and what they are rented for."""
    plan = material.plan
    count = plan.knobs.processes
    grid = table("card", "memory", "needs", "budget", "", "price an hour", "seen", right=(1, 2, 3, 5))
    for offer in sorted(material.cards, key=lambda each: (not each.fits, each.hardware.total_bytes)):
        name, price = offer.hardware.name, offer.price
        sizes = (offer.hardware.total_bytes, offer.required_bytes, offer.budget_bytes)
        hourly = "" if price is None else money(price.per_hour * count, price.currency)
        seen = "" if price is None else ", ".join(filter(None, [price.provider, price.seen]))
        cells = (*map(format_bytes, sizes), "fits" if offer.fits else "does not fit", hourly, seen)
        is_plans = name == plan.estimate.hardware.name
        add(grid, name if count == 1 else f"{count} x {name}", *cells, style="bold" if is_plans else "")
    return grid


def _incidents(plan: Plan) -> Table:
    """Lists how often the device was full, and where another process went on."""
    grid = table("after step", "what", "where", "what was done", right=(0,))
    for incident in plan.experience.incidents:
        add(grid, str(incident.step), "out of memory", incident.phase.replace("_", " "), incident.remedy)
    for restart in plan.experience.restarts:
        add(grid, str(restart.step), "restart", restart.cause, restart.change or "the same settings")
    return grid
