"""Shows the cards and recipes that are known, and what a machine's examination found."""

from __future__ import annotations

import getpass
import itertools
import os
import re
import socket
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autotrain_mem.report.layout import BAD, GOOD, QUIET, Block, Column, add, columned, table, title
from autotrain_mem.support.recipe_files import Recipe
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import Hardware
from autotrain_mem.types.health import Health, State

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


_MARK_COLUMNS, _NAME_COLUMNS = 6, 16
_MARKS = {State.OK: ("ok", GOOD), State.NOTE: ("note", "yellow"), State.BROKEN: ("BROKEN", f"bold {BAD}")}


def doctor_view(health: Health) -> RenderableType:
    """A line for each finding, by area, with what mends it below; a sentence for all of it last."""
    parts: list[RenderableType] = []
    for area, findings in itertools.groupby(health.findings, key=lambda each: each.area):
        grid = table("", "", "", show_header=False)
        grid.columns[0].width, grid.columns[1].width = _MARK_COLUMNS, _NAME_COLUMNS
        for finding in findings:
            word, style = _MARKS[finding.state]
            text = Text(finding.text, style=QUIET if finding.state is State.OK else "")
            if finding.fix:
                text.append(f"\n{finding.fix}", style="bold")
            add(grid, Text(word, style=style), finding.name, text)
        parts += [title(area), Block(grid, 2)]
    return Block(Group(*parts, Text(), Text(summary(health), style="bold")))


def summary(health: Health) -> str:
    """Says in a sentence what can be done on this machine."""
    if health.broken:
        verb = "thing does" if health.broken == 1 else "things do"
        return f"{health.broken} {verb} not work; the command below each line mends it."
    if health.has_gpu:
        return "Everything works: autofit can plan and train here."
    return "No GPU here: autofit can plan for any card (--gpu NAME), and train on the CPU with --simulate."


def issue_text(health: Health, versions: Mapping[str, str | None]) -> str:
    """Writes Markdown without secrets: no values of variables but harmless ones, no names of user or machine."""
    rows = [f"| {finding.area} | {finding.name} | {finding.state} | {finding.text} |" for finding in health.findings]
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version and " " not in name)
    table_text = "\n".join(["| area | what | state | |", "|---|---|---|---|", *rows])
    return f"{private_free(table_text)}\n\n{installed}\n"


def private_free(text: str) -> str:
    """Takes the names of the user's home, the user and the machine out of a text."""
    home, host = os.path.expanduser("~"), socket.gethostname()
    for private, public in ((home, "~"), (_user(), "USER"), (host, "HOST")):
        if len(private) > 1:
            text = re.sub(rf"(?<![\w-]){re.escape(private)}(?![\w-])", public, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return ""
