"""``autofit report``: writes what a plan says, or what a run did, as a page for a browser."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from autotrain_mem import api
from autotrain_mem.cli.run_flags import flag_parser, parsed
from autotrain_mem.report.terminal import Console, waiting, whole_lines
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import Plan, codec
from autotrain_mem.types.plan_file import STDIN

ABOUT = """\
Writes one HTML file that opens without a network: memory over the rehearsed step, stacked by what it is for; what was
predicted beside what a probe and the run measured; loss and speed; what was tried; how long the rows are; other cards.
Where nothing is kept of the plan's rehearsal it is rehearsed again, which takes some ten seconds and no GPU.

  autofit report Qwen2.5-0.5B-SFT
"""
_PATH = "a plan's file: the report is written beside it; or an output folder: it is written into it, as report.html"


def report(argv: Sequence[str]) -> int:
    """Writes the report of one plan or run. Raises UsageError, PlanFileError and OutputFolderError."""
    parser = flag_parser("report", ABOUT)
    parser.add_argument("path", metavar="PLAN|RUN", nargs="?", help=_PATH)
    parser.add_argument("--out", metavar="FILE", help="write it here, over an earlier report and over nothing else")
    parser.add_argument("--json", action="store_true", help="print what the page shows, and write no file")
    parser.add_argument("--debug", action="store_true", help="a traceback with an error")
    if (options := parsed(parser, argv)) is None:
        return 0
    if options.path in (None, STDIN):
        raise UsageError("autofit report needs a plan's file or an output folder.", hint="autofit report plan.json")
    Plan.load(options.path)  # what is no plan is refused first
    file = api.report_path(options.path) if options.out is None else Path(options.out)
    if not options.json:
        api.check_report_place(file)
    with waiting(Console(stderr=True), "reading the plan") as say:
        page = api.report_page(options.path, on_progress=say)
    if options.json:
        sys.stdout.write(json.dumps(codec.to_json(page)) + "\n")
        return 0
    api.write_report(file, page)
    console = whole_lines()
    console.print(f"Wrote {file} ({format_bytes(file.stat().st_size)}): open it in a browser.", highlight=False)
    for sentence in page.not_shown:
        console.print(sentence, highlight=False)
    return 0
