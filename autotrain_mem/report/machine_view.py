"""Shows the known cards and recipes, and the findings of ``autofit doctor``."""

import contextlib
import getpass
import itertools
import os
import re
import socket
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autotrain_mem.report.layout import BAD, GOOD, QUIET, Indented, add, table
from autotrain_mem.support.units import format_bytes
from autotrain_mem.support.yaml_files import Recipe
from autotrain_mem.types import Hardware, Health, Soundness

_UNKNOWN = "-"

_GPUS_NOTE = f"""\
Memory is what torch reports, which is less than the size on the box.
Speeds are the vendors' figures: 1 GB/s is 10**9 bytes per second; bf16 is without sparsity.
{_UNKNOWN} means unknown or missing, such as bf16 tensor cores before Ampere."""

_RECIPES_NOTE = """\
autofit METHOD --recipe NAME plans for this machine's GPU and trains; flags override the recipe.
The recipe's header describes its plan for the card above: --gpu CARD --plan_only shows that plan on any machine."""


def gpus_view(cards: Sequence[Hardware]) -> RenderableType:
    """Lists the cards that a plan can be made for."""
    grid = table("name", "memory", "bandwidth GB/s", "bf16 TFLOP/s", "compute capability", right=(1, 2, 3, 4))
    for card in cards:
        bandwidth, flops = card.bandwidth_bytes_per_second, card.bf16_flops_per_second
        add(
            grid,
            card.name,
            format_bytes(card.total_bytes),
            _UNKNOWN if bandwidth is None else f"{bandwidth / 1e9:.0f}",
            _UNKNOWN if flops is None else f"{flops / 1e12:.1f}",
            ".".join(map(str, card.compute_capability or _UNKNOWN)),
        )
    return Indented(Group(grid, Text(), Text(_GPUS_NOTE, style=QUIET)))


def recipes_view(recipes: Sequence[Recipe]) -> RenderableType:
    """Lists the recipes by name."""
    grid = table("name", "method", "card", "what it is")
    for each in recipes:
        card = each.card if each.gpus == 1 else f"{each.gpus}x{each.card}"
        add(grid, each.name, each.method, card, each.what)
    return Indented(Group(grid, Text(), Text(_RECIPES_NOTE, style=QUIET)))


_MARK_COLUMNS, _NAME_COLUMNS = 6, 16
_MARKS = {Soundness.OK: ("ok", GOOD), Soundness.NOTE: ("note", "yellow"), Soundness.BROKEN: ("BROKEN", f"bold {BAD}")}


def doctor_view(health: Health) -> RenderableType:
    """Shows a line for each finding, by area, with its fix below, and a summary."""
    parts: list[RenderableType] = []
    for area, findings in itertools.groupby(health.findings, key=lambda each: each.area):
        grid = table("", "", "", show_header=False)
        grid.columns[0].width, grid.columns[1].width = _MARK_COLUMNS, _NAME_COLUMNS
        for finding in findings:
            word, style = _MARKS[finding.state]
            text = Text(finding.text, style=QUIET if finding.state is Soundness.OK else "")
            if finding.fix:
                text.append(f"\n{finding.fix}", style="bold")
            add(grid, Text(word, style=style), finding.name, text)
        parts += [Text(area, style="bold"), Indented(grid, 2)]
    return Indented(Group(*parts, Text(), Text(summary(health), style="bold")))


def summary(health: Health) -> str:
    """Summarizes in a sentence what this machine can do."""
    if health.broken:
        verb = "thing does" if health.broken == 1 else "things do"
        return f"{health.broken} {verb} not work; the command below each line fixes it."
    if health.has_gpu:
        return "Everything works: autofit can plan and train here."
    return "No GPU here: autofit can plan for any card (--gpu NAME), and train on the CPU with --simulate."


def issue_text(health: Health, versions: Mapping[str, str | None]) -> str:
    """Writes the findings as Markdown for an issue, without the names of the user and the machine."""
    rows = [f"| {finding.area} | {finding.name} | {finding.state} | {finding.text} |" for finding in health.findings]
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version and " " not in name)
    table_text = "\n".join(["| area | what | state | |", "|---|---|---|---|", *rows])
    return f"{private_free(table_text)}\n\n{installed}\n"


def private_free(text: str) -> str:
    """Replaces the user's home folder, the user's name and the machine's name in a text."""
    user = ""
    with contextlib.suppress(KeyError, OSError):  # a user id without a name, as in containers
        user = getpass.getuser()
    for private, public in ((os.path.expanduser("~"), "~"), (user, "USER"), (socket.gethostname(), "HOST")):
        if len(private) > 1:
            text = re.sub(rf"(?<![\w-]){re.escape(private)}(?![\w-])", public, text)
    return text
