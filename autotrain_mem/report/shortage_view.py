"""Explains an out-of-memory error: what was requested, what was free, what held the rest, and what would fit."""

import io

from rich.console import Group
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import QUIET, Indented, add, hanging, scale_for, table
from autotrain_mem.report.terminal import Console
from autotrain_mem.support import codec
from autotrain_mem.support.errors import GpuOutOfMemoryError
from autotrain_mem.support.units import counted, format_bytes
from autotrain_mem.types import Owner, Plan, Shortage

WIDTH = 80
"""Columns of the text in an error, which a log or a notebook shows unwrapped."""

NOTHING_FITS = "No change that the plan may make saves more memory: lower --headroom, or use a larger card."


def shortage_text(shortage: Shortage, plan: Plan) -> str:
    """Shows the failed request, and a table of all of the card's memory: predicted and measured bytes by owner."""
    estimate, asked = plan.estimate, "an unknown amount more"
    if shortage.requested_bytes is not None:
        asked = f"{format_bytes(shortage.requested_bytes)} more"
        # The first tensor of a shared segment requests the whole segment.
        if shortage.segment_bytes is not None and shortage.segment_bytes != shortage.requested_bytes:
            asked += f", in a segment of {format_bytes(shortage.segment_bytes)}"
    needs = f"  needs   {asked}, with {format_bytes(shortage.free_bytes)} free"
    if shortage.cached_bytes:
        needs += f" and {format_bytes(shortage.cached_bytes)} cached in pieces too small for it"
    parts = [f"{format_bytes(shortage.total_bytes)} total"]
    parts += [f"{format_bytes(shortage.others_bytes)} used by others"] if shortage.others_bytes else []
    parts += [f"{format_bytes(estimate.hardware.free_bytes - estimate.budget_bytes)} headroom"]
    budget = f"  budget  {format_bytes(estimate.budget_bytes)} ({', '.join(parts)})"
    peak = formatting.PHASES[estimate.memory.peak_phase]
    planned = f"  planned {format_bytes(estimate.required_bytes)}{estimate.segments}, most of it in phase {peak}"

    expected, held = estimate.memory.owners_at_peak, shortage.measured
    apart = [owner for owner in Owner if owner in held or not shortage.rest_bytes]
    rows = [(formatting.OWNERS[owner], expected.get(owner, 0), held.get(owner, 0)) for owner in apart]
    rows = [row for row in rows if any(row[1:])]
    if shortage.rest_bytes:  # owners that were not distinguished are summed
        together = [owner for owner in Owner if owner not in apart and expected.get(owner)]
        name = ", ".join(formatting.OWNERS[owner] for owner in together) or "other tensors"
        rows.append((name, sum(expected[owner] for owner in together), shortage.rest_bytes))
    rows += [
        ("cached by the allocator", estimate.cached_bytes, shortage.cached_bytes),
        ("outside torch", estimate.outside_bytes, shortage.outside_bytes),
    ]
    scale = scale_for(max(shortage.total_bytes, estimate.required_bytes))
    predicted = scale.column([*(size for _, size, _ in rows), None])
    measured = scale.column([*(size for _, _, size in rows), None])
    grid = table("", "", "predicted", "measured", "", right=(2, 3))
    names = [*(("+", name) for name, _, _ in rows), ("=", "held by this run")]
    for (sign, name), *sizes in zip(names, predicted, measured, strict=True):
        add(grid, sign, name, *sizes, scale.unit, style="bold" if sign == "=" else "")
    for name, size in (("held by other processes", shortage.others_bytes), ("free", shortage.free_bytes)):
        if size:
            add(grid, "", name, "", scale.size(size), scale.unit, style=QUIET)
    file = io.StringIO()
    view = Indented(Group(*map(hanging, (needs, budget, planned)), Text(), grid))
    Console(file=file, width=WIDTH, no_color=True, highlight=False).print(view)
    return file.getvalue().rstrip("\n")


def explained(shortage: Shortage, plan: Plan, nearest: str | None) -> GpuOutOfMemoryError:
    """Returns the error that ends a run; ``nearest`` is the smallest change that would fit, as flags."""
    hint = NOTHING_FITS if nearest is None else f"smallest change that would fit: {nearest}"
    where = "" if shortage.phase is None else f" {formatting.PHASES[shortage.phase]},"
    steps = counted(shortage.step, "optimizer step")
    headline = f"{plan.model} ran out of memory on {plan.estimate.hardware.name}:{where} after {steps}."
    message = f"{headline}\n{shortage_text(shortage, plan)}"
    return GpuOutOfMemoryError(message, hint=hint, details=codec.to_json(shortage))
