"""What one configuration needs, as a person reads it: the verdict first, then a column that adds up to it."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import wording
from autotrain_mem.report.amounts import Scale, scale_for
from autotrain_mem.report.layout import BAD, GOOD, QUIET, Bar, Block, add, hanging, table, title
from autotrain_mem.spec import Estimate, Hardware, Owner
from autotrain_mem.units import format_bytes

LARGEST_MODULES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sum:
    """The shown figures, in steps of the scale: the owners sum to the peak, and this and what follows to the need."""

    scale: Scale
    owners: tuple[int, ...]
    peak: int
    allowance: int
    non_torch: int
    vllm_share: int
    needed: int


def estimate_view(estimate: Estimate) -> RenderableType:
    """One configuration against one device: verdict, budget, phases, modules, and what the figures leave out."""
    memory, shown = estimate.memory, _sum(estimate)
    parts: list[RenderableType] = [
        verdict(estimate),
        hanging(f"settings  {wording.settings(estimate.knobs)}"),
        Text(),
        _sum_table(estimate, shown),
        Text(),
        title("peak allocated by phase"),
        Block(_phase_table(estimate, shown), 2),
    ]
    if memory.modules_at_peak:
        parts += [Text(), title("largest modules at the peak"), Block(_module_table(estimate), 2)]
    if memory.not_counted:
        parts += [Text(), title("not counted")]
        parts += [Block(hanging(f"-  {each}"), 2) for each in memory.not_counted]
    parts += [Text(), Text(f"rehearsed in {wording.duration(memory.rehearsal_seconds)}", style=QUIET)]
    return Block(Group(*parts))


def verdict(estimate: Estimate, how: str = "") -> Text:
    """``fits rtx3060: needs 8.41 GiB of 11.2 GiB``; ``how`` stands after the card's name."""
    word, style = ("fits", GOOD) if estimate.fits else ("does not fit", BAD)
    needs = wording.needs(estimate.required_bytes, estimate.budget_bytes)
    return Text.assemble((word, f"bold {style}"), (f" {estimate.hardware.name}{how}: {needs}", "bold"))


def _sum(estimate: Estimate) -> _Sum:
    memory = estimate.memory
    scale = scale_for(max(estimate.required_bytes, estimate.budget_bytes))
    needed = scale.steps(estimate.required_bytes)
    outside = [estimate.hardware.non_torch_bytes, estimate.vllm_share_bytes]
    sizes = [memory.peak_allocated_bytes, memory.reserve_allowance_bytes, *outside]
    peak, allowance, non_torch, vllm_share = scale.share(needed, sizes)
    owners = scale.share(peak, [memory.owners_at_peak.get(owner, 0) for owner in Owner])
    return _Sum(
        scale=scale,
        owners=tuple(owners),
        peak=peak,
        allowance=allowance,
        non_torch=non_torch,
        vllm_share=vllm_share,
        needed=needed,
    )


def _sum_table(estimate: Estimate, shown: _Sum) -> Table:
    """Each total is the sum of the figures shown above it; owners of nothing are left out."""
    peak_phase = wording.PHASES[estimate.memory.peak_phase]
    owned = [each for each in zip(Owner, shown.owners, strict=True) if estimate.memory.owners_at_peak.get(each[0])]
    rows = [("+", wording.OWNERS[owner], steps, "") for owner, steps in owned]
    rows += [
        ("=", "peak allocated", shown.peak, f"in the {peak_phase} phase"),
        ("+", "allowance for reserved", shown.allowance, "what the allocator keeps beyond what is allocated"),
        ("+", "outside torch", shown.non_torch, _outside_torch(estimate.hardware)),
    ]
    if estimate.vllm_share_bytes:
        rows.append(("+", "vLLM's share", shown.vllm_share, "a pool of its own for its weights and KV cache"))
    rows.append(("=", "needed", shown.needed, ""))
    made = table("", "", shown.scale.unit, "", right=(2,))
    for sign, name, steps, note in rows:
        text = Text(note, style=f"not bold {QUIET}")
        add(made, sign, name, shown.scale.write(steps), text, style="bold" if sign == "=" else "")
    _add_budget(made, estimate, shown)
    return made


def _add_budget(made: Table, estimate: Estimate, shown: _Sum) -> None:
    hardware, scale = estimate.hardware, shown.scale
    others = hardware.total_bytes - hardware.free_bytes
    note = [f"{format_bytes(hardware.total_bytes)} in all"]
    note += [f"{format_bytes(others)} used by others"] if others else []
    note += [f"{format_bytes(hardware.free_bytes - estimate.budget_bytes)} headroom"]
    budget = scale.steps(estimate.budget_bytes)
    add(made, "", "budget", scale.write(budget), Text(", ".join(note), style=f"not bold {QUIET}"), style="bold")
    name, style = ("left", GOOD) if estimate.fits else ("too much", BAD)
    add(made, "", Text(name, style=style), Text(scale.write(abs(budget - shown.needed)), style=style))


def _outside_torch(hardware: Hardware) -> str:
    return "the process itself" if hardware.origin == "cpu" else "the CUDA context and its modules"


def _phase_table(estimate: Estimate, shown: _Sum) -> Table:
    phases, scale = estimate.memory.phases, shown.scale
    largest = max((1, *phases.values()))
    made = table("phase", "peak", "", right=(1,), show_header=False)
    for phase, peak in phases.items():
        steps = shown.peak if peak == estimate.memory.peak_allocated_bytes else scale.steps(peak)
        add(made, wording.PHASES[phase], f"{scale.write(steps)} {scale.unit}", Bar(peak / largest))
    return made


def _module_table(estimate: Estimate) -> Table:
    made = table("size", "module", right=(0,), show_header=False)
    for name, size in estimate.memory.modules_at_peak[:LARGEST_MODULES]:
        add(made, format_bytes(size), name)
    return made
