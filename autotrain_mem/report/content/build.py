"""Builds the page of a plan or a run: decides every word and figure on it, and nothing of how it looks."""

from __future__ import annotations

from autotrain_mem.report import formatting
from autotrain_mem.report.content.figures import bars, charts
from autotrain_mem.report.content.grids import grids
from autotrain_mem.report.content.material import Material
from autotrain_mem.report.estimate import verdict
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import Plan, Report
from autotrain_mem.types.page import Page

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
    return Page(
        title=f"{plan.model}, {plan.method}, on {formatting.cards(plan.estimate.hardware)}",
        verdict=str(verdict(plan.estimate, _changes(plan))),
        fits=plan.estimate.fits,
        command=material.command,
        made=material.made,
        versions=_versions(plan),
        how_to_read=(*_HOW_TO_READ, _OF_A_RUN if is_run else _OF_A_PLAN),
        key_figures=tuple(_key_figures(plan, material.report)),
        timelines=material.timelines,
        charts=tuple(charts(material)),
        bars=tuple(bars(material)),
        grids=tuple(grids(material)),
        not_shown=material.not_shown,
    )


def _versions(plan: Plan) -> dict[str, str]:
    """Returns what was installed; digests of files, which only a cache needs, are left out."""
    installed = {name: version for name, version in plan.versions.items() if version and " " not in name}
    return installed | {"autotrain_mem": installed.get("autotrain_mem", "")[:DIGITS]}


def _changes(plan: Plan) -> str:
    return f" with {formatting.counted(len(plan.levers), 'change')}" if plan.levers else " as asked for"


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
        step = formatting.brief(estimate.time.step_seconds)
        figures.append(("speed", f"{formatting.rate(estimate.time.tokens_per_second)} tokens/s", f"{step} a step"))
    if plan.run_seconds is not None and plan.optimizer_steps is not None:
        steps = formatting.counted(plan.optimizer_steps, "step")
        figures.append(("time", formatting.duration(plan.run_seconds), f"predicted for {steps}"))
    if report is not None and report.has_trained:
        steps = formatting.counted(report.steps - report.began_at, "step")
        figures.append(("trained", formatting.duration(report.seconds), steps))
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
