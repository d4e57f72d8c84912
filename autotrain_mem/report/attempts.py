"""Shows what the search rehearsed, one line each, in the order in which it was tried."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rich.console import Group, RenderableType
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import BAD, GOOD, QUIET, Block, Column, Scale, columned, hanging, scale_for, title
from autotrain_mem.support.units import counted, rate
from autotrain_mem.types import Candidate, Knobs, Plan

_SEGMENTS = "expandable_segments"
_LAYERS = "rehearsed_layers"

CHOSEN = ">"

_Numbered = tuple[int, Candidate]


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
    marks = _marks(plan)
    scale = scale_for(max(plan.estimate.budget_bytes, *(attempt.required_bytes for attempt in plan.attempts)))
    grid = columned(list(enumerate(plan.attempts)), _columns(plan, marks, scale), lambda row: row[0] == _chosen(plan))
    budget = scale.write(scale.steps(plan.estimate.budget_bytes))
    heading = f"tried; needs are in {scale.unit}, the budget is {budget}"
    return Block(Group(title(heading), Block(grid), *_legend(plan, marks)))


def _columns(plan: Plan, marks: list[_Mark], scale: Scale) -> list[Column[_Numbered]]:
    first, chosen = plan.attempts[0].knobs, _chosen(plan)
    speeds = any(attempt.tokens_per_second for attempt in plan.attempts)
    return [
        Column("", lambda row: _number(row[0], len(plan.attempts), chosen=row[0] == chosen), right=True),
        Column("batch", lambda row: _batch(row[1], marks)),
        Column("settings", lambda row: formatting.difference(row[1].knobs, first)),
        Column("needs", lambda row: scale.write(scale.steps(row[1].required_bytes)), right=True),
        Column("tokens/s" if speeds else "fits", lambda row: _outcome(row[1], speeds=speeds), right=True),
    ]


def _number(index: int, count: int, *, chosen: bool) -> Text:
    return Text(f"{CHOSEN if chosen else ''}{index + 1:>{len(str(count))}}", style=GOOD if chosen else "")


def _chosen(plan: Plan) -> int | None:
    """The last rehearsal of what was chosen: the one of the whole model, where it was one of few layers before."""
    return max((at for at, each in enumerate(plan.attempts) if each.knobs == plan.knobs), default=None)


def _batch(attempt: Candidate, marks: list[_Mark]) -> str:
    signs = "".join(mark.sign for mark in marks if mark.on(attempt))
    return f"{formatting.batch(attempt.knobs)} {signs}".rstrip()


def _outcome(attempt: Candidate, *, speeds: bool) -> Text:
    """Speed where it fits: that of what does not fit is nobody's."""
    if not attempt.fits:
        return Text("too much" if speeds else "no", style=BAD)
    return Text(rate(attempt.tokens_per_second) if attempt.tokens_per_second else "yes")


def _marks(plan: Plan) -> list[_Mark]:
    """Lists what is marked beside the batch, since attempts differ in it."""
    marks = []
    if len({attempt.knobs.gradient_checkpointing for attempt in plan.attempts}) > 1:
        marks.append(_Mark("gradient_checkpointing", "*", when=False, meaning="without gradient checkpointing"))
    expanded = {attempt.knobs.expandable_segments for attempt in plan.attempts}
    if len(expanded) > 1 or any(lever.name == _SEGMENTS for lever in plan.levers):  # else every one is as the user said
        marks.append(_Mark(_SEGMENTS, "+", when=True, meaning=f"with {formatting.segments(expandable=True)}"))
    layers = {attempt.rehearsed_layers for attempt in plan.attempts}
    if len(layers) > 1 and None in layers:
        few = max(filter(None, layers))
        others = f"the others on copies of {counted(few, 'layer')}"
        marks.append(_Mark(_LAYERS, "w", when=None, meaning=f"rehearsed on the whole model, {others}"))
    return marks


def _legend(plan: Plan, marks: list[_Mark]) -> list[RenderableType]:
    varying = formatting.BATCHES | {mark.name for mark in marks} | {"sharding"}
    shared = [field.name for field in fields(Knobs) if field.name not in varying]
    chosen = [Text(f"{CHOSEN:14}chosen")] if _chosen(plan) is not None else []
    layers = {attempt.rehearsed_layers for attempt in plan.attempts} - {None}
    is_marked = any(mark.name == _LAYERS for mark in marks)
    expanded = "all of them on copies of fewer layers, expanded to the whole depth"
    return [
        *chosen,
        hanging(f"as asked for  {formatting.settings(plan.attempts[0].knobs, shared)}"),
        *(hanging(f"{mark.sign:14}{mark.meaning}") for mark in marks),
        *([Text(expanded, style=QUIET)] if layers and not is_marked else []),
    ]
