"""Runs the commands that only show things: ``autofit report``, ``watch``, ``explain``, ``doctor``, ``recipes``."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.live import Live

from autotrain_mem.cli.flags import CommandParser
from autotrain_mem.cli.trained_run import how_to_continue
from autotrain_mem.report.difference_view import difference_view
from autotrain_mem.report.explain_view import explain_view
from autotrain_mem.report.layout import Indented
from autotrain_mem.report.machine_view import doctor_view, issue_text, recipes_view
from autotrain_mem.report.run_history import HistoryReader
from autotrain_mem.report.run_view import RunSnapshot, happening_lines, watch_line, watch_view
from autotrain_mem.report.terminal import Console, LiveLine, is_live, lasting_console, say, whole_lines
from autotrain_mem.support import codec, yaml_files
from autotrain_mem.support.errors import PlanFileError, UsageError
from autotrain_mem.support.units import format_bytes
from autotrain_mem.support.yaml_files import recipe
from autotrain_mem.types import Plan
from autotrain_mem.types.plan_file import LARGEST_BYTES, STDIN
from autotrain_mem.types.planned import read_plan

_REPORT = """\
Writes one HTML file that opens without a network: memory over the rehearsed step, stacked by owner; the prediction
beside what a probe and the run measured; loss and speed; what was tried; the lengths of the rows.

  autofit report Qwen2.5-0.5B-SFT
"""
_PATH = "a plan's file, beside which the report is written; or an output folder, in which it becomes report.html"


def report(argv: Sequence[str]) -> int:
    """Writes the report of one plan or run. Raises UsageError for a wrong command line, PlanFileError if the plan
    cannot be read, and OutputFolderError if the report cannot be written."""
    from autotrain_mem import api

    parser = CommandParser("report", _REPORT)
    parser.add_argument("path", metavar="PLAN|RUN", nargs="?", help=_PATH)
    parser.add_argument("--out", metavar="FILE", help="write it here; only an earlier report is overwritten")
    parser.add_argument("--json", action="store_true", help="print what the page shows, and write no file")
    options = parser.read(argv)
    if options.path in (None, STDIN):
        raise UsageError("autofit report needs a plan's file or an output folder.", hint="autofit report plan.json")
    Plan.load(options.path)  # raises early if it is not a plan
    file = api.report_path(options.path) if options.out is None else Path(options.out)
    if not options.json:
        api.check_report_place(file)
    with LiveLine(Console(stderr=True), "reading the plan and drawing its figures"):
        page = api.report_page(options.path)
    if options.json:
        sys.stdout.write(json.dumps(codec.to_json(page)) + "\n")
        return 0
    api.write_report(file, page)
    console = whole_lines()
    console.print(f"Wrote {file} ({format_bytes(file.stat().st_size)}): open it in a browser.", highlight=False)
    for sentence in page.not_shown:
        console.print(sentence, highlight=False)
    return 0


_WATCH = """\
Shows a run from the files in its output folder: steps and time left, memory against the budget, loss, speed, and its
incidents. It updates in place until the run ends; without a terminal, it prints a line for each change.

  autofit watch Qwen2.5-0.5B-SFT
"""
LOOK_SECONDS = 1.0
"""Seconds between two reads of the files."""


def watch(argv: Sequence[str]) -> int:
    """Watches a run until it ends. Raises UsageError if the folder holds no run and none is starting in it."""
    from autotrain_mem import api

    parser = CommandParser("watch", _WATCH)
    parser.add_run()
    parser.add_argument("--once", action="store_true", help="show its present state, and stop")
    parser.add_argument("--json", action="store_true", help="print the whole history once, as one JSON object")
    options = parser.read(argv)
    folder = Path(options.run)
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}.", hint="Give the --output_dir of a training run.")
    reader = HistoryReader(folder)

    def look() -> RunSnapshot:
        plan = None
        try:
            alive = api.is_under_way(folder)  # first: a run writes how it ended before it releases its lock
            history = reader.read()
        except OSError as error:
            raise UsageError(f"{folder} cannot be read: {error.strerror}.", hint="Give another folder.") from error
        with contextlib.suppress(PlanFileError):
            plan = Plan.load(folder)
        return RunSnapshot(name=folder.name or str(folder), plan=plan, history=history, alive=alive, now=time.time())

    first = look()
    if first.history is None and not first.alive and first.plan is None:
        hint = "Give the --output_dir of a run that autofit has started."
        raise UsageError(f"{folder} holds no run of autofit.", hint=hint)
    if options.json:
        history = None if first.history is None else codec.to_json(first.history)
        sys.stdout.write(json.dumps({"schema": "autofit.watch/1", "state": first.state, "history": history}) + "\n")
        return 0
    console, last = Console(), first
    if options.once or first.is_over:
        console.print(Indented(watch_view(first)))
    else:
        try:
            last = _follow(look, first)
        except KeyboardInterrupt:  # only the watching ends; the run goes on
            sys.stdout.write("\n")
    if last.is_over and last.plan is not None and last.state != "finished":
        say(console, how_to_continue(folder, last.plan.method))
    return 0


def _follow(look: Callable[[], RunSnapshot], watched: RunSnapshot) -> RunSnapshot:
    """Redraws a run until it is over, and returns its end; without a terminal, prints a line for each change."""
    console, said, last = lasting_console(), 0, ""
    live = Live(console=console, auto_refresh=False) if is_live(console) else None
    with live or contextlib.nullcontext():
        while True:
            if live is not None:
                live.update(watch_view(watched), refresh=True)
            else:
                happenings = () if watched.history is None else watched.history.happenings
                for line in happening_lines(happenings[said:]):
                    print(line, flush=True)
                said, line = len(happenings), watch_line(watched)
                if line.split("  ")[0] != last or watched.is_over:
                    last = line.split("  ")[0]
                    print(line, flush=True)
            if watched.is_over:
                return watched
            time.sleep(LOOK_SECONDS)
            watched = look()


_EXPLAIN = """\
Explains a plan from its file alone: what it needs line by line, where the bytes are at the peak, what limits it, what
was tried in which order, the time of a step, and what other levels of harm offer.

PLAN is what `autofit plan ... --out FILE` wrote or --json printed, what `autofit METHOD ... --json` printed, an output
folder, which holds a plan.json, or - for standard input.

With --against, it compares two plans: which settings, versions and allocations differ.

  autofit explain new.json --against old.json
"""


def explain(argv: Sequence[str]) -> int:
    """Prints what one plan holds, or in what two differ. Raises UsageError for a wrong command line, and PlanFileError
    for an unreadable plan."""
    parser = CommandParser("explain", _EXPLAIN)
    parser.add_argument("plan", metavar="PLAN", nargs="?", help="a plan's file, an output folder, or -")
    parser.add_argument("--against", metavar="OTHER", help="compare with another plan: a file or an output folder")
    usage = "autofit explain plan.json, autofit explain OUTPUT_FOLDER, or autofit explain - for standard input."
    if "--json" in argv:
        raise UsageError("autofit explain takes no --json: the plan's file is JSON already.", hint=usage)
    options = parser.read(argv)
    if options.plan is None:
        raise UsageError("autofit explain needs a plan.", hint=usage)
    if options.plan == STDIN:
        plan = read_plan(sys.stdin.buffer.read(LARGEST_BYTES + 1), "Standard input")
    else:
        plan = Plan.load(options.plan)
    other = None if options.against is None else Plan.load(options.against)
    Console().print(explain_view(plan) if other is None else difference_view(plan, other))
    return 0


_DOCTOR = """\
Examines this machine: driver, GPUs, torch's build, packages, the Hugging Face Hub, disks, container and system. Shows
what works, what does not, and the command that fixes it. Exits with status 1 if something is broken, else with 0. A
missing GPU is not an error, since planning needs none.

  autofit doctor --issue | xclip
"""


def doctor(argv: Sequence[str]) -> int:
    """Examines the machine, and prints the findings."""
    from autotrain_mem import api

    parser = CommandParser("doctor", _DOCTOR)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--issue", action="store_true", help="a text to paste into an issue, without names or secrets")
    options = parser.read(argv)
    with LiveLine(Console(stderr=True), "looking at the GPU") as line:
        found = api.examine_machine(line.show)
    if options.json:
        sys.stdout.write(json.dumps(codec.to_json(found), indent=2) + "\n")
    elif options.issue:
        sys.stdout.write(issue_text(found, api.versions_key()))
    else:
        Console().print(doctor_view(found))
    return 1 if found.broken else 0


_RECIPES = """\
Lists the built-in recipes: name, method, the card that the recipe is for, and what it does. With a NAME, prints that
recipe: a file for --config.

  autofit sft --recipe NAME                             plans for this machine's GPU, and trains
  autofit plan sft --recipe NAME --gpu CARD             plans for a card by name
"""


def recipes(argv: Sequence[str]) -> int:
    """Lists the recipes, or prints one. Raises UsageError for an unknown name or flag."""
    parser = CommandParser("recipes", _RECIPES)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("name", metavar="NAME", nargs="?", help="print this one")
    either.add_argument("--json", action="store_true", help="list them as JSON, with the paths of their files")
    options = parser.read(argv)
    if options.name is not None:
        sys.stdout.write(recipe(options.name).path.read_text(encoding="utf-8"))
    elif options.json:
        listed = [{**codec.to_json(each), "method": each.method} for each in yaml_files.recipes()]
        sys.stdout.write(json.dumps({"schema": "autofit.recipes/1", "recipes": listed}, indent=2) + "\n")
    else:
        whole_lines().print(recipes_view(yaml_files.recipes()))
    return 0
