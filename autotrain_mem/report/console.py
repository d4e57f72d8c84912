"""Shows the lists of cards and of recipes, and what a run did. The caller owns the console."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import BAD, QUIET, Block, Column, add, columned, table
from autotrain_mem.support.recipe_files import Recipe
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import Hardware, Report

_UNKNOWN = "-"

_GPU_COLUMNS: tuple[Column[Hardware], ...] = (
    Column("name", lambda card: card.name),
    Column("memory", lambda card: format_bytes(card.total_bytes), right=True),
    Column("bandwidth GB/s", lambda card: _scaled(card.bandwidth_bytes_per_second, 1e9, 0), right=True),
    Column("bf16 TFLOP/s", lambda card: _scaled(card.bf16_flops_per_second, 1e12, 1), right=True),
    Column("compute capability", lambda card: _kernels(card), right=True),
)


def _kernels(card: Hardware) -> str:
    """NVIDIA's compute capability, or AMD's architecture."""
    return card.architecture or ".".join(map(str, card.compute_capability or _UNKNOWN))


def gpus_view(cards: Sequence[Hardware]) -> RenderableType:
    """The cards that a plan can be made for."""
    return Block(Group(columned(cards, _GPU_COLUMNS), Text(), Text(_GPUS_NOTE, style=QUIET)))


def _scaled(rate: float | None, unit: float, digits: int) -> str:
    return _UNKNOWN if rate is None else f"{rate / unit:.{digits}f}"


_GPUS_NOTE = f"""\
Memory is what torch reports, which is less than the size on the box.
Speeds are the vendors': 1 GB/s is 10**9 bytes per second, bf16 is dense.
{_UNKNOWN} is not known or not there, such as bf16 tensor cores before Ampere."""

_RECIPES_NOTE = """\
autofit METHOD --recipe NAME plans for the GPU that is here and trains; flags win over what a recipe says.
The card is the one that its header speaks of: --gpu CARD --plan_only shows that plan without it."""

_RECIPE_COLUMNS: tuple[Column[Recipe], ...] = (
    Column("name", lambda recipe: recipe.name),
    Column("method", lambda recipe: recipe.method),
    Column("card", lambda recipe: recipe.card if recipe.gpus == 1 else f"{recipe.gpus}x{recipe.card}"),
    Column("what it is", lambda recipe: recipe.what),
)


def recipes_view(recipes: Sequence[Recipe]) -> RenderableType:
    """A line for each, by name."""
    return Block(Group(columned(recipes, _RECIPE_COLUMNS), Text(), Text(_RECIPES_NOTE, style=QUIET)))


SHORT_RUN_ERROR = 0.02
"""A run that draws its longest rows is predicted closer than this; a peak further below has not met them."""


def report_view(report: Report, page: str | None = None) -> RenderableType:
    """Shows what a finished run did, how good its prediction was, and where its ``page`` for a browser is."""
    grid = table("", "", show_header=False)
    if not report.has_trained:
        add(grid, "output folder", report.output_dir)
        headline = f"nothing was left to train: the run was finished at step {report.steps}"
        return Block(Group(Text(headline, style="bold"), Block(grid, 2)))
    add(grid, "trained", formatting.trains(report.knobs, report.trained))
    add(grid, "schedule", _schedule(report))
    add(grid, "loss", _loss(report))
    if report.first_reward is not None:
        add(grid, "reward", _moved(report.first_reward, report.last_reward))
    add(grid, "peak", _allocated(report))
    if report.measured is not None:
        predicted, measured = report.predicted_peak_reserved_bytes, report.measured.peak_reserved_bytes
        add(grid, "", _peaks("reserved", predicted, measured, report.reserved_prediction_error))
        if retries := report.measured.num_alloc_retries:
            stops = "the allocator freed its cache and retried, which stalls the GPU: more --headroom avoids that"
            add(grid, "retries", f"{formatting.counted(retries, 'time')} {stops}")
    incidents = f"{formatting.counted(report.incidents, 'time')} out of memory" if report.incidents else ""
    restarts = formatting.counted(report.restarts, "restart") if report.restarts else ""
    if incidents or restarts:
        add(grid, "survived", ", ".join(filter(None, [incidents, restarts])))
    add(grid, "output folder", report.output_dir)
    if page is not None:
        add(grid, "report", f"{page} (open it in a browser)")
    steps = formatting.counted(report.steps - report.began_at, "step")
    since = f", from step {report.began_at} to {report.steps}" if report.began_at else ""
    headline = f"trained {steps} in {formatting.duration(report.seconds)}{since}"
    return Block(Group(Text(headline, style="bold"), Block(grid, 2)))


def _schedule(report: Report) -> str:
    steps = report.steps - report.began_at
    return formatting.schedule(report.knobs, report.schedule, steps=steps, step_tokens=report.step_tokens)


def _loss(report: Report) -> RenderableType:
    if (step := report.not_finite_step) is None:
        return _moved(report.first_loss, report.last_loss)
    first = "" if report.first_loss is None else f"{report.first_loss:#.4g} -> "
    return Text(f"{first}not a number from step {step} on: the trained weights are unusable", style=BAD)


def _moved(first: float | None, last: float | None) -> str:
    """``2.314 -> 1.870``; one value where one was logged."""
    if first is None or last is None:
        return "not logged"
    if first == last:
        return f"{first:#.4g}"
    return f"{first:#.4g} -> {last:#.4g}"


def _allocated(report: Report) -> str:
    predicted, measured = report.predicted_peak_bytes, report.measured
    if measured is None:
        return f"{format_bytes(predicted)} allocated predicted, nothing here measures it"
    sentence = _peaks("allocated", predicted, measured.peak_allocated_bytes, report.prediction_error)
    if (report.prediction_error or 0.0) <= SHORT_RUN_ERROR:
        return sentence
    if report.incidents:
        return f"{sentence} (the prediction is for whole micro-batches, of which some were split)"
    if report.longest_rows_first:
        return f"{sentence} (too high: the longest rows went through first)"
    return f"{sentence} (the prediction is for the longest row, which this run may not have drawn)"


def _peaks(kind: str, predicted_bytes: int, measured_bytes: int, error: float | None) -> str:
    """``7.42 GiB allocated predicted, 7.40 GiB measured: error +0.2 %``."""
    sentence = f"{format_bytes(predicted_bytes)} {kind} predicted, {format_bytes(measured_bytes)} measured"
    return sentence if error is None else f"{sentence}: error {100 * error:+.1f} %"
