"""Shows what one configuration needs: the verdict first, then a column of parts that add up to the need."""

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import BAD, GOOD, QUIET, Indented, Scale, add, hanging, scale_for, section, table
from autotrain_mem.support.files import check_replaceable, read_start, replace_file, writing
from autotrain_mem.support.units import brief, counted, duration, format_bytes, percent
from autotrain_mem.types import Estimate, Hardware, Owner

Line = tuple[str, str, int | None, str]
"""A line of a sum: its sign, a name, bytes and a note. The bytes of a total are None: it sums the lines above."""


def estimate_view(estimate: Estimate) -> RenderableType:
    """Shows one configuration on one device: verdict, budget, phases, modules, and what is not counted."""
    memory = estimate.memory
    parts: list[RenderableType] = [
        verdict(estimate),
        *([hanging(f"  {reason}")] if (reason := why_not(estimate)) else []),
        hanging(f"settings  {formatting.settings(estimate.knobs)}"),
        hanging(f"trains    {formatting.trains(estimate.knobs, memory.trained)}"),
        hanging(f"schedule  {formatting.schedule(estimate.knobs, step_tokens=estimate.time.tokens)}"),
        hanging(f"speed     {formatting.speed(estimate.time)}"),
        *([hanging(f"base      {estimate.unquantized}")] if estimate.unquantized else []),
        *([hanging(f"experts   {estimate.routed}")] if estimate.routed else []),
        *([hanging(f"host      {estimate.on_host}")] if estimate.on_host else []),
        *memory_blocks(estimate),
        *not_counted(estimate),
    ]
    if estimate.hardware.origin == "detected":
        parts += [Text(), hanging(f"card      {estimate.hardware.source}")]
    parts += [Text(), Text(f"rehearsed in {duration(memory.rehearsal_seconds)}", style=QUIET)]
    return Indented(Group(*parts))


def memory_blocks(estimate: Estimate) -> list[RenderableType]:
    """Returns the sum at the peak, both modes of the caching allocator, the phases, and the largest modules."""
    blocks = section("where the memory goes, at the peak", sum_table(estimate), indent=0)
    scale, time = scale_of(estimate), estimate.time
    if caches(estimate.hardware):
        modes = estimate.memory.reserved.modes
        stumbles = not all(mode.fits for mode in modes.values())
        headings = ("", "peak", "slack", *(("retries", "largest refused") if stumbles else ()), "")
        grid = table(*headings, right=tuple(range(1, len(headings) - 1)))
        for expandable, mode in modes.items():
            chosen = expandable == estimate.grows
            counted = chosen and estimate.reserved_bytes == mode.peak_reserved_bytes
            cells = [f"{scale.size(each)} {scale.unit}" for each in (mode.peak_reserved_bytes, mode.slack_bytes)]
            refused = "none" if mode.largest_refused_bytes is None else format_bytes(mode.largest_refused_bytes)
            cells += [str(mode.num_alloc_retries), refused] if stumbles else []
            mark = Text("counted above" if counted else "", style=f"not bold {QUIET}")
            add(grid, "expandable" if expandable else "fixed-size", *cells, mark, style="bold" if chosen else "")
        blocks += section("peak reserved, by kind of segments; slack is the part not allocated at that moment", grid)
    is_known = formatting.has_speed(time)
    grid = table("", "", "", "", right=(1, 2, 3), show_header=False)
    for phase, peak in estimate.memory.phases.items():
        seconds = time.phases.get(phase)
        took = ["" if seconds is None or not is_known else brief(seconds)]
        took += ["" if seconds is None or not time.step_seconds else percent(seconds / time.step_seconds)]
        add(grid, formatting.PHASES[phase], f"{scale.size(peak)} {scale.unit}", *took)
    rates = f", by the rates of {time.assumed}" if time.assumed else ""
    blocks += section(f"peak allocated by phase, and the phase's share of a step's time{rates}", grid)
    for _, heading, modules in module_tables(estimate):
        blocks += section(heading, modules)
    return blocks


def verdict(estimate: Estimate, how: str = "") -> Text:
    """Returns ``fits rtx3060: needs 8.41 GiB of 11.2 GiB``; ``how`` follows the card's name."""
    word, style = ("fits", GOOD) if estimate.fits else ("does not fit", BAD)
    words = f" {estimate.hardware.name}{how}: {formatting.needs(estimate)}"
    return Text.assemble((word, f"bold {style}"), (words, "bold"))


def module_tables(estimate: Estimate) -> Iterator[tuple[str, str, Table]]:
    """Yields key, heading and table of the model's parts, and of its largest modules, at the peak, if known."""
    memory = estimate.memory
    for key, heading, sizes in (
        ("parts", "parts of the model at the peak, with all that they hold", memory.parts_at_peak),
        ("modules", "largest modules at the peak", memory.modules_at_peak),
    ):
        grid = table("", "", right=(0,), show_header=False)
        for name, size in sizes:
            add(grid, format_bytes(size), name)
        if sizes:
            yield key, heading, grid


def not_counted(estimate: Estimate) -> list[RenderableType]:
    """Lists what the figures leave out."""
    lines = [f"-  {each}" for each in estimate.memory.not_counted]
    return section("not counted", *lines) if lines else []


def why_not(estimate: Estimate) -> str:
    """Explains why a run does not fit if its allocated bytes alone would fit; empty otherwise."""
    if estimate.fits or estimate.memory.peak_allocated_bytes + estimate.outside_bytes > estimate.budget_bytes:
        return ""
    reserved = estimate.reserved
    if reserved.largest_refused_bytes is not None:
        reason = f"the largest request that fails: {format_bytes(reserved.largest_refused_bytes)}"
    elif reserved.num_alloc_retries:
        times = counted(reserved.num_alloc_retries, "time")
        reason = f"it would run only by freeing its cache {times}, which stalls the GPU each time"
    else:
        reason = "the allocated memory would fit, but not together with the cached memory"
    other = estimate.growing()
    if other.required_bytes < estimate.required_bytes:
        fits = "which fits" if other.fits else "which does not fit either"
        reason += f"; expandable segments would need {format_bytes(other.required_bytes)}, {fits}"
    return reason


def scale_of(estimate: Estimate) -> Scale:
    """Returns the unit in which all views show the sizes of an estimate."""
    return scale_for(max(estimate.required_bytes, estimate.budget_bytes))


def sum_table(estimate: Estimate) -> Table:
    """Returns a table of the parts, whose rounded figures add up to the need, and of the budget."""
    hardware, scale = estimate.hardware, scale_of(estimate)
    peak_phase = formatting.PHASES[estimate.memory.peak_phase]
    owners = estimate.memory.owners_at_peak
    lines: list[Line] = [("+", formatting.OWNERS[owner], owners[owner], "") for owner in Owner if owners.get(owner)]
    lines.append(("=", "peak allocated", None, f"in the {peak_phase} phase"))
    if caches(hardware):
        cached = f"free blocks and split remainders{estimate.segments}"
        lines.append(("+", "cached by the allocator", estimate.cached_bytes, cached))
    note = "the CUDA context and its modules" if caches(hardware) else "the process itself"
    if hardware.origin == "imagined" and hardware.non_torch_bytes:
        note = "a CUDA context, assumed: the largest of any card up to this size"
    lines.append(("+", "outside torch", hardware.non_torch_bytes, note))
    if size := estimate.communicators_bytes:
        lines.append(("+", "NCCL", size, "its communicators, assumed until a probe measures them"))
    if share_bytes := estimate.vllm_share_bytes:
        note, sleep = "its own pool for weights and KV cache", estimate.vllm_sleep
        if sleep is not None and sleep.is_decided_awake:
            asleep = format_bytes(sleep.asleep_bytes)
            note = f"while it generates, when most is needed; asleep it keeps up to {asleep}"
        elif sleep is not None:
            note = f"at most, while it sleeps; {format_bytes(sleep.awake_bytes)} while it generates"
        lines.append(("+", "vLLM's share", share_bytes, note))
    lines.append(("=", "needed", None, ""))
    grid = table("", "", scale.unit, "", right=(2,))
    for (sign, name, _, note), cell in zip(lines, scale.column(size for _, _, size, _ in lines), strict=True):
        add(grid, sign, name, cell, Text(note, style=f"not bold {QUIET}"), style="bold" if sign == "=" else "")
    others = hardware.total_bytes - hardware.free_bytes
    parts = [f"{format_bytes(hardware.total_bytes)} in all"]
    parts += [f"{format_bytes(others)} used by others"] if others else []
    parts += [f"{format_bytes(hardware.free_bytes - estimate.budget_bytes)} headroom"]
    budget = Text(", ".join(parts), style=f"not bold {QUIET}")
    add(grid, "", "budget", scale.size(estimate.budget_bytes), budget, style="bold")
    name = "left" if estimate.required_bytes <= estimate.budget_bytes else "too much"
    style = GOOD if estimate.fits else BAD
    left = scale.hundredths(estimate.budget_bytes) - scale.hundredths(estimate.required_bytes)  # as shown
    add(grid, "", Text(name, style=style), Text(f"{abs(left) / 100:.2f}", style=style))
    return grid


def caches(hardware: Hardware) -> bool:
    """Returns whether the device has torch's caching allocator; a host has none."""
    return hardware.origin != "cpu"


_PROTOCOL = 4
"""pytorch.org/memory_viz reads pickles of protocols 2 to 4 (torch/utils/viz/MemoryViz.js: unpickle)."""

_PLACE = "--snapshot a file"
"""The flag that names the file, for errors."""


def check_snapshot(path: Path) -> None:
    """Checks the path before there is a snapshot. Raises OutputFolderError if it cannot be written or replaced."""
    check_replaceable(path, _PLACE, "snapshot", lambda file: read_start(file, 1) in (b"", pickle.PROTO))


def write_snapshot(path: Path, snapshot: Mapping[str, Any]) -> None:
    """Writes or replaces a snapshot atomically. Raises OutputFolderError if the file cannot be written."""
    check_snapshot(path)
    with writing(path, _PLACE):
        replace_file(path.resolve(), pickle.dumps(snapshot, _PROTOCOL))


def snapshot_view(path: Path, estimate: Estimate) -> Text:
    """Describes where the file is, how to open it, and what it does not cover."""
    vllm = estimate.vllm_share_bytes
    share = f", {format_bytes(vllm)} of it vLLM's," if vllm else ""
    lines = [
        f"Wrote the predicted history to {path} ({format_bytes(path.stat().st_size)}).",
        f"Drag it onto https://pytorch.org/memory_viz, or run python -m torch.cuda._memory_viz trace_plot {path}.",
        f"It covers torch's allocator only, not the {format_bytes(estimate.outside_bytes)}{share} outside it.",
    ]
    if not estimate.reserved.fits:
        lines.append("The run does not fit: after each oom the history continues as if there had been enough memory.")
    return Text("\n".join(lines))
