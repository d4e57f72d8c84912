"""Shows in what two plans differ: the settings, the versions, and the allocations that make one need more memory."""

from collections.abc import Iterable, Iterator
from dataclasses import fields

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import Indented, Scale, add, scale_for, section, table
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import Owner, Plan

Row = tuple[str, int | None, int | None]
"""A name, and its bytes in this plan and in the other one; None if unknown."""

TOTALS = ("peak allocated", "needed")


def difference_view(plan: Plan, other: Plan) -> RenderableType:
    """Compares a plan with another one of any method, card or version: what it needs more or less, and why."""
    first, second = plan.estimate, other.estimate
    more = first.required_bytes - second.required_bytes
    words = f"{format_bytes(abs(more))} {'more' if more > 0 else 'less'} than" if more else "as much as"
    needs, others = format_bytes(first.required_bytes), format_bytes(second.required_bytes)
    inputs = table("", "this plan", "other plan")
    for name, *values in _inputs(plan, other):
        if values[0] != values[1]:
            add(inputs, name, *("not set" if value is None else formatting.value(value) for value in values))
    nothing = "nothing: settings, arguments, versions, card and data are the same"
    scale = scale_for(max(first.required_bytes, second.required_bytes))
    owners = [each.memory.owners_at_peak for each in (first, second)]
    sums: list[Row] = [(formatting.OWNERS[owner], owners[0].get(owner, 0), owners[1].get(owner, 0)) for owner in Owner]
    sums += [
        (TOTALS[0], first.memory.peak_allocated_bytes, second.memory.peak_allocated_bytes),
        ("cached by the allocator", first.cached_bytes, second.cached_bytes),
        ("outside torch", first.outside_bytes, second.outside_bytes),
        (TOTALS[1], first.required_bytes, second.required_bytes),
    ]
    held, held_by_other = dict(first.memory.modules_at_peak), dict(second.memory.modules_at_peak)
    modules = [(name, held.get(name), held_by_other.get(name)) for name in {**held, **held_by_other}]
    modules = sorted((row for row in modules if row[1] != row[2]), key=lambda row: -abs((row[1] or 0) - (row[2] or 0)))
    which = f"activations and temporary tensors by module, in {scale.unit}; - is not among the largest"
    parts: list[RenderableType] = [
        Text(f"needs {needs}, {words} the other plan ({others})", style="bold"),
        *section("what differs", inputs if inputs.row_count else nothing),
        *section(f"the memory at the peak, in {scale.unit}", _sizes(sums, scale)),
        *(section(which, _sizes(modules, scale)) if modules else []),
    ]
    return Indented(Group(*parts))


def _inputs(plan: Plan, other: Plan) -> Iterator[tuple[str, object, object]]:
    """Yields the name of everything that decides about memory, with its values in both plans."""
    first, second = plan.estimate, other.estimate
    yield "method", plan.method, other.method
    yield "model", plan.model, other.model
    yield "the model's config", plan.model_digest[:8], other.model_digest[:8]
    yield "card", formatting.cards(first.hardware), formatting.cards(second.hardware)
    yield "budget", format_bytes(first.budget_bytes), format_bytes(second.budget_bytes)
    for field in fields(plan.knobs):
        yield field.name, getattr(plan.knobs, field.name), getattr(other.knobs, field.name)
    for name in sorted({*plan.job.arguments, *other.job.arguments} - {field.name for field in fields(plan.knobs)}):
        yield f"--{name}", plan.job.arguments.get(name), other.job.arguments.get(name)
    yield "tokens of the longest row", plan.row_tokens, other.row_tokens
    yield "PYTORCH_ALLOC_CONF", plan.allocator or None, other.allocator or None
    for name in sorted({*plan.versions, *other.versions}):
        yield name, plan.versions.get(name), other.versions.get(name)


def _sizes(rows: Iterable[Row], scale: Scale) -> Table:
    grid = table("", "this plan", "other plan", "difference", right=(1, 2, 3))
    for name, *sizes in rows:
        cells = ["-" if size is None else scale.size(size) for size in sizes]
        first, second = sizes
        if first is not None and second is not None and cells[0] != cells[1]:
            cells.append(f"{'-' if first < second else '+'}{scale.size(abs(first - second))}")
        if first or second:
            add(grid, name, *cells, style="bold" if name in TOTALS else "")
    return grid
