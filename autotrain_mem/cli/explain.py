"""``autofit explain``: shows a plan from its file alone. Rehearses nothing, looks at no card and needs no network."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from autotrain_mem.report.explain_view import explain_view
from autotrain_mem.report.terminal import Console
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Plan
from autotrain_mem.types.plan import read_plan
from autotrain_mem.types.plan_file import LARGEST_BYTES, STDIN

HELP = """\
usage: autofit explain PLAN [--debug]

Tells from the file alone what a plan was made of: the budget line by line, where the bytes are at the peak, what binds,
what was tried in which order, the time of a step, and what other levels of harm have to offer.

PLAN is what `autofit plan ... --out FILE` wrote or --json printed, what `autofit METHOD ... --json` printed, an output
folder, which holds a plan.json, or - for standard input.
"""

_USAGE = "autofit explain plan.json, autofit explain OUTPUT_FOLDER, or autofit explain - for standard input."


def explain(argv: Sequence[str]) -> int:
    """Read one plan and say what it knows. Raises UsageError and PlanFileError."""
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(HELP)
        return 0
    path = _path(argv)
    piped = path == STDIN
    plan = read_plan(sys.stdin.buffer.read(LARGEST_BYTES + 1), "Standard input") if piped else Plan.load(path)
    Console().print(explain_view(plan))
    return 0


def _path(argv: Sequence[str]) -> str:
    given = [token for token in argv if token != "--debug"]
    flags = [token for token in given if token.startswith("-") and token != STDIN]
    if "--json" in flags:
        raise UsageError("autofit explain takes no --json: the plan is JSON itself.", hint=_USAGE)
    if flags:
        raise UsageError(f"autofit explain takes no {flags[0]}.", hint=_USAGE)
    if len(given) != 1:
        wrong = f"autofit explain takes one plan, not {len(given)}." if given else "autofit explain needs a plan."
        raise UsageError(wrong, hint=_USAGE)
    return given[0]
