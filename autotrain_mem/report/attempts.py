"""Shows what the search rehearsed, one line each, in the order in which it was tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from rich.console import Group, RenderableType
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import BAD, GOOD, QUIET, Indented, add, hanging, scale_for, table, title
from autotrain_mem.settings.levers import EXPANDABLE
from autotrain_mem.settings.words import CHECKPOINTING
from autotrain_mem.support.units import counted, rate
from autotrain_mem.types import Candidate, Knobs, Plan

_LAYERS = "rehearsed_layers"

CHOSEN = ">"


@dataclass(frozen=True, slots=True)
class _Mark:
    """A sign beside the batch, for what attempts differ in."""

    name: str
    """Of the knob; ``rehearsed_layers`` for what was rehearsed."""
    sign: str
    when: object
    """The value that is marked."""
    meaning: str

    def on(self, attempt: Candidate) -> bool:
        of = attempt if self.name == _LAYERS else attempt.knobs
        return bool(getattr(of, self.name) == self.when)


def attempts_view(plan: Plan) -> RenderableType:
    """One line for each point that the search rehearsed, with what it has that the first had not."""
    if not plan.attempts:
        return Text("nothing else was tried")
    # The last rehearsal of what was chosen is the one of the whole model, where it was one of few layers before.
    chosen = max((at for at, each in enumerate(plan.attempts) if each.knobs == plan.knobs), default=None)
    first, marks = plan.attempts[0].knobs, _marks(plan)
    scale = scale_for(max(plan.estimate.budget_bytes, *(attempt.required_bytes for attempt in plan.attempts)))
    speeds = any(attempt.tokens_per_second for attempt in plan.attempts)
    grid = table("", "batch", "settings", "needs", "tokens/s" if speeds else "fits", right=(0, 3, 4))
    for index, attempt in enumerate(plan.attempts):
        is_chosen = index == chosen
        number = f"{CHOSEN if is_chosen else ''}{index + 1:>{len(str(len(plan.attempts)))}}"
        signs = "".join(mark.sign for mark in marks if mark.on(attempt))
        if attempt.fits:  # the speed of what does not fit is nobody's
            outcome = Text(rate(attempt.tokens_per_second) if attempt.tokens_per_second else "yes")
        else:
            outcome = Text("too much" if speeds else "no", style=BAD)
        add(
            grid,
            Text(number, style=GOOD if is_chosen else ""),
            f"{formatting.batch(attempt.knobs)} {signs}".rstrip(),
            formatting.difference(attempt.knobs, first),
            scale.size(attempt.required_bytes),
            outcome,
            style="bold" if is_chosen else "",
        )
    heading = f"tried; needs are in {scale.unit}, the budget is {scale.size(plan.estimate.budget_bytes)}"
    legend = [Text(f"{CHOSEN:14}chosen")] if chosen is not None else []
    return Indented(Group(title(heading), Indented(grid), *legend, *_legend(plan, marks)))


def _marks(plan: Plan) -> list[_Mark]:
    marks = []
    if len({attempt.knobs.recomputes for attempt in plan.attempts}) > 1:
        marks.append(_Mark(CHECKPOINTING, "*", when=False, meaning="without gradient checkpointing"))
    expanded = {attempt.knobs.expandable_segments for attempt in plan.attempts}
    if len(expanded) > 1 or any(
        lever.name == EXPANDABLE for lever in plan.levers
    ):  # else every one is as the user said
        marks.append(_Mark(EXPANDABLE, "+", when=True, meaning=f"with {formatting.segments(expandable=True)}"))
    layers = {attempt.rehearsed_layers for attempt in plan.attempts}
    if len(layers) > 1 and None in layers:
        few = max(filter(None, layers))
        others = f"the others on copies of {counted(few, 'layer')}"
        marks.append(_Mark(_LAYERS, "w", when=None, meaning=f"rehearsed on the whole model, {others}"))
    return marks


def _legend(plan: Plan, marks: list[_Mark]) -> Iterator[RenderableType]:
    varying = formatting.BATCHES | {mark.name for mark in marks} | {"sharding"}
    shared = [field.name for field in fields(Knobs) if field.name not in varying]
    yield hanging(f"as asked for  {formatting.settings(plan.attempts[0].knobs, shared)}")
    yield from (hanging(f"{mark.sign:14}{mark.meaning}") for mark in marks)
    if any(each.rehearsed_layers for each in plan.attempts) and not any(mark.name == _LAYERS for mark in marks):
        yield Text("all of them on copies of fewer layers, expanded to the whole depth", style=QUIET)
