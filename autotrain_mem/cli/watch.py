"""``autofit watch``: shows a run from its files while it trains, also one that another terminal or machine started."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.live import Live

from autotrain_mem import api
from autotrain_mem.cli.run_flags import flag_parser, parsed
from autotrain_mem.report.layout import Block
from autotrain_mem.report.run_history import HistoryReader
from autotrain_mem.report.run_view import Watched, happening_lines, watch_line, watch_view
from autotrain_mem.report.terminal import Console, is_live, lasting_console
from autotrain_mem.support.errors import PlanFileError, UsageError
from autotrain_mem.types import Plan, codec

ABOUT = """\
Shows a run from the files in its output folder: steps and time left, memory against the budget, loss, speed, and what
happened to it. It updates in place until the run ends; where no terminal is, it prints a line for what is new.

  autofit watch Qwen2.5-0.5B-SFT
"""
LOOK_SECONDS = 1.0
"""Between two looks at the files."""


def watch(argv: Sequence[str]) -> int:
    """Watches a run until it ends. Raises UsageError where the folder is none of a run's, and is none to be."""
    parser = flag_parser("watch", ABOUT)
    parser.add_argument("run", metavar="RUN", nargs="?", help="the output folder of a training")
    parser.add_argument("--once", action="store_true", help="show how it is now, and stop")
    parser.add_argument("--json", action="store_true", help="its whole history as one JSON object, once")
    parser.add_argument("--debug", action="store_true", help="a traceback with an error")
    if (options := parsed(parser, argv)) is None:
        return 0
    folder = Path(options.run)
    look = _looking(folder)
    first = look()
    if options.json:
        history = None if first.history is None else codec.to_json(first.history)
        sys.stdout.write(json.dumps({"schema": "autofit.watch/1", "state": first.state, "history": history}) + "\n")
        return 0
    console = Console()
    if options.once or first.is_over:
        console.print(Block(watch_view(first, ascii_only=console.options.ascii_only)))
        return 0
    try:
        _follow(look, first)
    except KeyboardInterrupt:  # whoever watches stops watching; the run goes on
        sys.stdout.write("\n")
    return 0


def _looking(folder: Path) -> Callable[[], Watched]:
    """Returns what looks at a folder.

    Raises:
        UsageError: it is not there, or holds neither a run nor a plan.
    """
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}.", hint="Give the --output_dir of a training.")
    reader = HistoryReader(folder)

    def look() -> Watched:
        try:
            history, alive = reader.read(), api.is_under_way(folder)
        except OSError as error:
            raise UsageError(f"{folder} cannot be read: {error.strerror}.", hint="Give another folder.") from error
        return Watched(
            name=folder.name or str(folder), plan=_plan(folder), history=history, alive=alive, now=time.time()
        )

    found = look()
    if found.history is None and not found.alive and found.plan is None:
        hint = "Give the --output_dir of a training that autofit has begun."
        raise UsageError(f"{folder} holds no run of autofit.", hint=hint)
    return look


def _plan(folder: Path) -> Plan | None:
    try:
        return Plan.load(folder)
    except PlanFileError:
        return None


def _follow(look: Callable[[], Watched], watched: Watched) -> None:
    console = lasting_console()
    if not is_live(console):
        _print_lines(look, watched)
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(watch_view(watched, ascii_only=console.options.ascii_only), refresh=True)
            if watched.is_over:
                return
            time.sleep(LOOK_SECONDS)
            watched = look()


def _print_lines(look: Callable[[], Watched], watched: Watched) -> None:
    """Prints a line for each step that is new, and for whatever happens."""
    said, last = 0, ""
    while True:
        happenings = () if watched.history is None else watched.history.happenings
        for line in happening_lines(happenings[said:]):
            print(line, flush=True)
        said = len(happenings)
        line = watch_line(watched)
        if line.split("  ")[0] != last or watched.is_over:
            last = line.split("  ")[0]
            print(line, flush=True)
        if watched.is_over:
            return
        time.sleep(LOOK_SECONDS)
        watched = look()
