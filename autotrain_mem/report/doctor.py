"""Shows what a machine's examination found, and writes it as a text to paste into an issue."""

from __future__ import annotations

import getpass
import itertools
import os
import re
import socket
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from autotrain_mem.report.layout import BAD, GOOD, QUIET, Block, add, table, title
from autotrain_mem.types.health import Health, State

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
