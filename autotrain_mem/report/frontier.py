"""How much of one thing fits at each level of harm: a table, and a figure of bars."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.layout import BAD, QUIET, Bar, Block, Column, Scale, add, columned, hanging, scale_for, title
from autotrain_mem.report.layout import table as plain_table
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types.most import Frontier, Reach

BAR_WIDTH = 40

_NOTE = """\
Each level is at its least demanding settings there, rehearsed on copies of few layers where these tell the whole.
tokens/s are of these settings, and so a lower bound: a plan for the same {name} may be faster.
--{name} max plans with the most of the first level that holds any, confirmed on the whole model."""


def frontier_view(frontier: Frontier) -> RenderableType:
    """Shows for each level the most that fits, what it needs and how fast it is, and the same as bars."""
    scale = scale_for(frontier.budget_bytes)
    heading = f"{frontier.name} on {frontier.gpu}, level by level; the budget is {format_bytes(frontier.budget_bytes)}"
    parts: list[RenderableType] = [title(heading), Text(), columned(frontier.reaches, _columns(frontier, scale))]
    if reached := [each for each in frontier.reaches if each.most is not None]:
        parts += [Text(), _bars(reached)]
    ends = dict.fromkeys(each.most.stopped_by for each in reached if each.most is not None and each.most.stopped_by)
    parts += [Text(), *(hanging(f"=  {end}") for end in ends), Text(_NOTE.format(name=frontier.name), style=QUIET)]
    return Block(Group(*parts))


def _columns(frontier: Frontier, scale: Scale) -> list[Column[Reach]]:
    return [
        Column("level", lambda each: each.level),
        Column(frontier.name, _most, right=True),
        Column("does not fit", _beyond, right=True),
        Column("needs", lambda each: "" if each.point is None else _size(scale, each.point.required_bytes), right=True),
        Column("tokens/s", _speed, right=True),
        Column("batch", lambda each: "" if each.point is None else formatting.batch(each.point.knobs)),
    ]


def _most(reach: Reach) -> Text:
    return Text("nothing fits", style=BAD) if reach.most is None else Text(f"{reach.most.value:,}")


def _beyond(reach: Reach) -> str:
    """The neighbour; ``=`` where something else than the card ends it."""
    if reach.most is None:
        return ""
    return "=" if reach.most.next_value is None else f"{reach.most.next_value:,}"


def _speed(reach: Reach) -> str:
    if reach.point is None:
        return ""
    speed = reach.point.tokens_per_second
    return "-" if not speed else formatting.rate(speed)


def _size(scale: Scale, size_bytes: int) -> str:
    return scale.write(scale.steps(size_bytes))


def _bars(reached: Sequence[Reach]) -> Table:
    """Draws a bar for each level, as long as what fits there, on one scale."""
    longest = max(each.most.value for each in reached if each.most is not None)
    grid = plain_table("", "", "", show_header=False)
    for each in reached:
        value = 0 if each.most is None else each.most.value
        add(grid, each.level, Bar(value / longest, BAR_WIDTH), f"{value:,}")
    return grid
