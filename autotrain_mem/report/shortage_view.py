"""Out of memory, explained: what was asked for, what there was, who held it, and what would fit."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import QUIET, Indented, Scale, add, hanging, scale_for, table
from autotrain_mem.report.terminal import Console
from autotrain_mem.support.errors import GpuOutOfMemoryError
from autotrain_mem.support.units import counted, format_bytes
from autotrain_mem.types import Owner, Plan, codec
from autotrain_mem.types.shortage import Shortage

WIDTH = 80
"""Of the text in an error, which a log or a notebook shows as it is."""

NOTHING_FITS = "Nothing that the planner may change takes less; --headroom and another card are left."


@dataclass(frozen=True, slots=True)
class _Row:
    """One holder, or their sum."""

    sign: str
    name: str
    predicted_bytes: int
    measured_bytes: int


def shortage_text(shortage: Shortage, plan: Plan) -> str:
    """Shows the request, and a column of holders that adds up to the card, beside what the rehearsal expected."""
    file = io.StringIO()
    view = Indented(Group(*(hanging(line) for line in _summary(shortage, plan)), Text(), _holders(shortage, plan)))
    Console(file=file, width=WIDTH, no_color=True, highlight=False).print(view)
    return file.getvalue().rstrip("\n")


def explained(shortage: Shortage, plan: Plan, nearest: str | None) -> GpuOutOfMemoryError:
    """The error that ends a run.

    Args:
        nearest: The smallest change that would fit, as flags; None where there is none.
    """
    hint = NOTHING_FITS if nearest is None else f"smallest change that would fit: {nearest}"
    where = "" if shortage.phase is None else f" {formatting.PHASES[shortage.phase]},"
    steps = counted(shortage.step, "optimizer step")
    headline = f"{plan.model} ran out of memory on {plan.estimate.hardware.name}:{where} after {steps}."
    message = f"{headline}\n{shortage_text(shortage, plan)}"
    return GpuOutOfMemoryError(message, hint=hint, details=codec.to_json(shortage))


def _summary(shortage: Shortage, plan: Plan) -> list[str]:
    estimate = plan.estimate
    needs = f"  needs   {_asked(shortage)}, with {format_bytes(shortage.free_bytes)} free"
    if shortage.cached_bytes:
        needs += f" and {format_bytes(shortage.cached_bytes)} cached in pieces too small for it"
    parts = [f"{format_bytes(shortage.total_bytes)} total"]
    parts += [f"{format_bytes(shortage.others_bytes)} used by others"] if shortage.others_bytes else []
    parts += [f"{format_bytes(estimate.hardware.free_bytes - estimate.budget_bytes)} headroom"]
    budget = f"  budget  {format_bytes(estimate.budget_bytes)} ({', '.join(parts)})"
    peak = formatting.PHASES[estimate.memory.peak_phase]
    return [needs, budget, f"  planned {format_bytes(estimate.required_bytes)}, most of it in phase {peak}"]


def _asked(shortage: Shortage) -> str:
    """``1.20 GiB more``; a tensor that shares a segment with others yet to come asks for all of that segment."""
    if shortage.requested_bytes is None:
        return "an unknown amount more"
    asked = f"{format_bytes(shortage.requested_bytes)} more"
    if shortage.segment_bytes is None or shortage.segment_bytes == shortage.requested_bytes:
        return asked
    return f"{asked}, in a segment of {format_bytes(shortage.segment_bytes)}"


def _holders(shortage: Shortage, plan: Plan) -> Table:
    rows = _rows(shortage, plan)
    scale = scale_for(max(shortage.total_bytes, plan.estimate.required_bytes))
    predicted = _shown(rows, [row.predicted_bytes for row in rows], scale)
    measured = _shown(rows, [row.measured_bytes for row in rows], scale)
    grid = table("", "", "predicted", "measured", "", right=(2, 3))
    for row, expected, held in zip(rows, predicted, measured, strict=True):
        style = "bold" if row.sign == "=" else ""
        add(grid, row.sign, row.name, scale.write(expected), scale.write(held), scale.unit, style=style)
    for name, size in (("held by other processes", shortage.others_bytes), ("free", shortage.free_bytes)):
        if size:
            add(grid, "", name, "", scale.size(size), scale.unit, style=QUIET)
    return grid


def _rows(shortage: Shortage, plan: Plan) -> list[_Row]:
    """Owners that were told apart, the rest of what was allocated, what the process held beside that, and the sum."""
    estimate = plan.estimate
    rows = [
        *_owner_rows(shortage, estimate.memory.owners_at_peak),
        _Row("+", "cached by the allocator", estimate.cached_bytes, shortage.cached_bytes),
        _Row("+", "outside torch", estimate.outside_bytes, shortage.outside_bytes),
    ]
    predicted, measured = sum(row.predicted_bytes for row in rows), sum(row.measured_bytes for row in rows)
    return [*rows, _Row("=", "held by this run", predicted, measured)]


def _owner_rows(shortage: Shortage, expected: Mapping[Owner, int]) -> list[_Row]:
    """Those that are not known apart stand together, and so does what was predicted for them."""
    measured, rest_bytes = shortage.measured, shortage.rest_bytes
    apart = [owner for owner in Owner if owner in measured or not rest_bytes]
    held = [_Row("+", formatting.OWNERS[owner], expected.get(owner, 0), measured.get(owner, 0)) for owner in apart]
    rows = [row for row in held if row.predicted_bytes or row.measured_bytes]
    together = [owner for owner in Owner if owner not in apart and expected.get(owner)]
    if rest_bytes:
        name = ", ".join(formatting.OWNERS[owner] for owner in together) or "not told apart"
        rows.append(_Row("+", name, sum(expected[owner] for owner in together), rest_bytes))
    return rows


def _shown(rows: list[_Row], sizes: list[int], scale: Scale) -> list[int]:
    """In steps of the scale, such that the parts sum to the total, which stands last."""
    total = scale.steps(sizes[-1])
    return [*scale.share(total, sizes[:-1]), total]
