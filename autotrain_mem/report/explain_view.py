"""A plan explained from its file alone: where the memory goes, what binds, what was tried, and what else there was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import formatting, plan_view
from autotrain_mem.report.estimate_view import memory_blocks, not_counted
from autotrain_mem.report.layout import BAD, GOOD, LOUD, QUIET, Indented, Scale, add, scale_for, section, table, title
from autotrain_mem.search.shardings import FASTEST_FIRST
from autotrain_mem.settings.levers import EXPANDABLE
from autotrain_mem.settings.own import Sharding
from autotrain_mem.settings.words import CHECKPOINTING
from autotrain_mem.support.units import counted, format_bytes, rate
from autotrain_mem.types import Candidate, Estimate, Knobs, Owner, Plan

_ALIKE = {*formatting.BATCHES, EXPANDABLE}
"""Settings in which a plan and one of a larger micro-batch may differ: what moves with it, and what costs nothing."""


def explain_view(plan: Plan) -> RenderableType:
    """Everything that a plan file knows, the answers first."""
    estimate = plan.estimate
    grid = table("", "", show_header=False)
    for fact in plan_view.facts(plan):
        add(grid, Text(fact.label, style=LOUD if fact.label in plan_view.NOTES else ""), fact.text)
    if estimate.hardware.source:
        add(grid, "card", estimate.hardware.source)
    bounds = table("", "", show_header=False)  # what stands in the way of more
    add(bounds, "more at once", _larger(plan))
    add(bounds, "less harm", _gentler(plan))
    parts: list[RenderableType] = [
        title(f"autofit {plan.method} --model {plan.model}"),
        *plan_view.decision(plan),
        Indented(grid, 2),
        *section("settings", plan_view.settings_table(plan)),
        *section("what binds", bounds),
        *memory_blocks(estimate),
        *sharing_view(plan),
        *attempts_view(plan),
        *plan_view.changes(plan),
        *plan_view.elsewhere(plan),
        *plan_view.proposed(plan),
        *plan_view.flags(plan),
        *not_counted(estimate),
    ]
    layers = estimate.memory.rehearsed_layers
    how = "" if layers is None else f", the plan itself on copies of {counted(layers, 'layer')} at most"
    return Indented(Group(*parts, Text(), Text(f"{plan_view.searched(plan)}{how}", style=QUIET)))


def _larger(plan: Plan) -> str:
    """Shows what the next larger micro-batch needs, of those that were rehearsed with the same settings."""
    rows, facts = plan.knobs.per_device_train_batch_size, plan.job.method_facts
    if plan.knobs.gradient_accumulation_steps == 1:
        return f"the whole batch of {rows} is computed at once already"
    if not plan.attempts:
        return "nothing was tried"
    last: dict[int, Candidate] = {}  # what was rehearsed last of each larger micro-batch
    for each in plan.attempts:
        is_alike = set(formatting.differing([each.knobs, plan.knobs])) <= _ALIKE
        if is_alike and each.knobs.per_device_train_batch_size > rows:
            last[each.knobs.per_device_train_batch_size] = each
    if not last:
        return f"no more than {facts.rows(rows)} at once {'were' if rows > 1 else 'was'} tried with these settings"
    nearest = min(last)
    tried = last[nearest]
    needed = f"{facts.rows(nearest)} need {format_bytes(tried.required_bytes)}"
    if not tried.fits:
        return f"{needed}, {format_bytes(tried.required_bytes - tried.budget_bytes)} more than the budget"
    speed = tried.tokens_per_second
    return f"{needed}, which fits{f', at {rate(speed)} tokens/s' if speed else ''}"


def _gentler(plan: Plan) -> str:
    """Shows what would have to be free for the next better level."""
    if plan.level == "as given":
        return "nothing was searched"
    if plan.level == "lossless":
        return "there is none: nothing but time is given up"
    before = plan_view.gentler(plan)
    if not before:
        return "no gentler level is left: forbidden, pinned away, or its weights alone are too much"
    nearest = before[-1]
    if sentence := plan_view.passed_over(nearest, plan):
        return sentence
    free_bytes = plan.estimate.hardware.free_bytes
    free = format_bytes(nearest.required_bytes + free_bytes - plan.estimate.budget_bytes)
    needed, there = format_bytes(nearest.required_bytes), format_bytes(free_bytes)
    return f"{nearest.level} needs {needed} at least: with the headroom {free} would have to be free; {there} are"


DIVIDED = (Owner.WEIGHTS, Owner.GRADIENTS, Owner.OPTIMIZER_STATE)
"""What shards divide among the processes."""


def sharing_view(plan: Plan) -> list[RenderableType]:
    """Every way of sharing beside the plan's; nothing for a single process.

    Bytes were rehearsed for the plan, and computed from its own for the others: these begin with ~.
    """
    if plan.knobs.processes == 1:
        return []
    estimate, own = plan.estimate, (plan.knobs.sharding or "ddp", plan.knobs.fsdp_offload_params)
    ways = [(each, False) for each in FASTEST_FIRST if each != "hsdp" or plan.knobs.sharding == "hsdp"]
    ways.append(("fsdp2", True))
    ways += [own] if plan.knobs.zero_stage else []
    grid = table("", "weights", "gradients", "state", "needs", "", right=(1, 2, 3, 4))
    for sharding, offloads in ways:
        is_plan = (sharding, offloads) == own
        held = (_held(estimate, owner, sharding, offloads=offloads) for owner in DIVIDED)
        sizes = [f"{'' if is_plan else '~'}{format_bytes(each)}" for each in held]
        name = f"{sharding.upper()}, offloaded" if offloads else formatting.SHARINGS[sharding]
        best = _best(plan, sharding, offloads=offloads)
        needs = "" if best is None else format_bytes(best.required_bytes)
        if best is None:
            outcome = Text("not rehearsed", style=QUIET)
        elif not best.fits:
            outcome = Text("too much", style=BAD)
        else:
            outcome = Text(f"{rate(best.tokens_per_second)} tokens/s" if best.tokens_per_second else "fits")
        add(grid, f"{'>' if is_plan else ' '} {name}", *sizes, needs, outcome, style="bold" if is_plan else "")
    return section("how the GPUs share the model, for each of them", grid, *_sentences(plan))


def _held(estimate: Estimate, owner: Owner, sharding: Sharding, *, offloads: bool) -> int:
    """Computes what a process would hold at the same peak, by its share; 0 of what lies on the host."""
    knobs = estimate.knobs
    size = estimate.memory.owners_at_peak.get(owner, 0)
    if (sharding, offloads) == (knobs.sharding, knobs.fsdp_offload_params):
        return size
    if offloads:
        return 0
    shards = 1 if sharding == "ddp" else knobs.shards if sharding == "hsdp" else knobs.processes
    return size * knobs.shards // shards


def _best(plan: Plan, sharding: Sharding, *, offloads: bool) -> Candidate | None:
    """The fastest that fits of those that were rehearsed at what the plan trains; else what needs least."""
    same = [
        each
        for each in plan.attempts
        if (each.knobs.sharding, each.knobs.fsdp_offload_params) == (sharding, offloads)
        and each.knobs.training == plan.knobs.training
    ]
    chosen = [each for each in same if each.knobs == plan.knobs]
    fitting = chosen[-1:] or sorted((each for each in same if each.fits), key=lambda each: each.tokens_per_second or 0)
    return fitting[-1] if fitting else min(same, key=lambda each: each.required_bytes, default=None)


def _sentences(plan: Plan) -> Iterator[str]:
    """Describes what FSDP does not divide, and what DDP would hold where that is too much."""
    knobs, estimate = plan.knobs, plan.estimate
    if not knobs.is_sharded or knobs.zero_stage:
        return
    gathered_bytes = estimate.memory.owners_at_peak.get(Owner.GATHERED_WEIGHTS, 0)
    yield (
        f"Divided by {knobs.shards}: weights, gradients and optimizer state. Not divided: activations, logits, what a "
        "layer computes with, and the layers whose weights are whole at a time (gathered weights "
        f"{format_bytes(gathered_bytes)} at the peak)."
    )
    best = _best(plan, "ddp", offloads=False)
    if (best is None or not best.fits) and not knobs.fsdp_offload_params:
        static_bytes = sum(_held(estimate, owner, "ddp", offloads=False) for owner in DIVIDED)
        if static_bytes + estimate.outside_bytes > estimate.budget_bytes:
            budget = format_bytes(estimate.budget_bytes)
            yield f"DDP would hold {format_bytes(static_bytes)} of these on each GPU, the budget is {budget}."


CHOSEN = ">"


class _Mark(NamedTuple):
    """A sign beside the batch, for what attempts differ in."""

    knob: str
    """Empty for what was rehearsed."""
    sign: str
    has: Callable[[Candidate], bool]
    meaning: str


def attempts_view(plan: Plan) -> list[RenderableType]:
    """The table, and what its signs mean."""
    if not plan.attempts:
        return [Text(), Text("nothing else was tried")]
    legend = (f"{sign:14}{meaning}" for sign, meaning in attempts_legend(plan))
    return section(f"tried; {attempts_units(plan)}", attempts_table(plan), *legend, indent=0)


def attempts_units(plan: Plan) -> str:
    """``needs are in GiB, the budget is 11.17``."""
    scale = _scale(plan)
    return f"needs are in {scale.unit}, the budget is {scale.size(plan.estimate.budget_bytes)}"


def _scale(plan: Plan) -> Scale:
    return scale_for(max(plan.estimate.budget_bytes, *(attempt.required_bytes for attempt in plan.attempts), 0))


def attempts_table(plan: Plan) -> Table:
    """One line for each point that the search rehearsed, with what it has that the first had not."""
    # The last rehearsal of what was chosen is the one of the whole model, where it was one of few layers before.
    chosen = max((at for at, each in enumerate(plan.attempts) if each.knobs == plan.knobs), default=None)
    scale, marks, width = _scale(plan), [*_marks(plan)], len(str(len(plan.attempts)))
    speeds = any(attempt.tokens_per_second for attempt in plan.attempts)
    grid = table("", "batch", "settings", "needs", "tokens/s" if speeds else "fits", right=(0, 3, 4))
    for index, attempt in enumerate(plan.attempts):
        is_chosen = index == chosen
        signs = "".join(mark.sign for mark in marks if mark.has(attempt))
        if attempt.fits:  # the speed of what does not fit is nobody's
            outcome = Text(rate(attempt.tokens_per_second) if attempt.tokens_per_second else "yes")
        else:
            outcome = Text("too much" if speeds else "no", style=BAD)
        add(
            grid,
            Text(f"{CHOSEN if is_chosen else ''}{index + 1:>{width}}", style=GOOD if is_chosen else ""),
            f"{formatting.batch(attempt.knobs)} {signs}".rstrip(),
            formatting.difference(attempt.knobs, plan.attempts[0].knobs),
            scale.size(attempt.required_bytes),
            outcome,
            style="bold" if is_chosen else "",
        )
    return grid


def attempts_legend(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields the signs of the table, each with its meaning."""
    marks = [*_marks(plan)]
    if any(each.knobs == plan.knobs for each in plan.attempts):
        yield CHOSEN, "chosen"
    varying = {*formatting.BATCHES, *(mark.knob for mark in marks), "sharding"}
    shared = [field.name for field in fields(Knobs) if field.name not in varying]
    yield "as asked for", formatting.settings(plan.attempts[0].knobs, shared)
    yield from ((mark.sign, mark.meaning) for mark in marks)
    if all(each.rehearsed_layers for each in plan.attempts):
        yield "", "all of them on copies of fewer layers, expanded to the whole depth"


def _marks(plan: Plan) -> Iterator[_Mark]:
    tried = plan.attempts
    if len({each.knobs.recomputes for each in tried}) > 1:
        yield _Mark(CHECKPOINTING, "*", lambda each: not each.knobs.recomputes, "without gradient checkpointing")
    differ = len({each.knobs.expandable_segments for each in tried}) > 1
    if differ or any(lever.name == EXPANDABLE for lever in plan.levers):  # else every one is as the user said
        meaning = f"with {formatting.segments(expandable=True)}"
        yield _Mark(EXPANDABLE, "+", lambda each: each.knobs.expandable_segments, meaning)
    layers = {each.rehearsed_layers for each in tried}
    if len(layers) > 1 and None in layers:
        few = counted(max(filter(None, layers)), "layer")
        meaning = f"rehearsed on the whole model, the others on copies of {few}"
        yield _Mark("", "w", lambda each: each.rehearsed_layers is None, meaning)
