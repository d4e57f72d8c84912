"""Implements the subcommands: each reads its flags, calls the api, and prints the result."""

import json
import pathlib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from autotrain_mem import api
from autotrain_mem.cli import flags, plan_files
from autotrain_mem.cli.flags import CommandParser
from autotrain_mem.report import terminal
from autotrain_mem.report.comparison_view import cards_view
from autotrain_mem.report.estimate_view import check_snapshot, estimate_view, snapshot_view
from autotrain_mem.report.explain_view import explain_view
from autotrain_mem.report.first_screen import estimate_screen, first_screen
from autotrain_mem.report.machine_view import gpus_view
from autotrain_mem.report.run_view import report_view
from autotrain_mem.run.several_machines import without_flags
from autotrain_mem.support import codec
from autotrain_mem.support.errors import DoesNotFitError
from autotrain_mem.types import Plan


def estimate(workers: api.Workers, request: api.RunRequest, output: flags.Output) -> int:
    """Runs ``autofit estimate METHOD``: estimates one configuration exactly as given. Returns 41 if it does not fit."""
    snapshot = None if output.snapshot is None else pathlib.Path(output.snapshot)
    if snapshot is not None:
        check_snapshot(snapshot)
    with _waiting("importing TRL") as (doing, note):
        rehearsals = api.rehearsals_for(workers, request, note)
        doing("rehearsing")
        estimated = api.estimate(rehearsals, snapshot)
    if output.json:
        _print_json(codec.to_json(estimated))
    else:
        terminal.Console().print(estimate_view(estimated) if output.verbose else estimate_screen(estimated))
    if snapshot is not None:
        terminal.whole_lines(stderr=True).print(snapshot_view(snapshot, estimated))
    return 0 if estimated.fits else DoesNotFitError.exit_code


def plan(workers: api.Workers, request: api.RunRequest, output: flags.Output) -> int:
    """Runs ``autofit plan METHOD``: finds the best configuration that fits."""
    request = _checked(request, output, to_train=False)
    if cards := api.compared(request.autofit):
        first = replace(request, autofit=replace(request.autofit, gpu=cards[0].name, gpus=cards[0].topology.devices))
        with _waiting("importing TRL, looking at the model") as (_, note):
            rehearsals = api.rehearsals_for(workers, first, note)
        console = terminal.Console(stderr=True)
        _say_example(console, rehearsals, to_train=False)
        with terminal.CardsProgress(console, len(cards)) as progress:
            compared = api.cards(rehearsals, cards, progress.tried, progress.counting)
        if output.json:
            return _print_json(codec.to_json(compared))
        terminal.whole_lines().print(cards_view(compared))
        return 0
    with _waiting("importing TRL, looking at the model") as (_, note):
        rehearsals = api.begin(workers, request, note, to_train=False)
    chosen = _decide(rehearsals, request, output, to_train=False)
    if output.stops:
        return plan_files.write_export(rehearsals, chosen, request, output)
    return _print_plan(chosen, request, output)


def _checked(request: api.RunRequest, output: flags.Output, *, to_train: bool) -> api.RunRequest:
    """Returns the request with its plan. Raises AutofitError for an impossible request, before any process starts."""
    plan_files.check_export(request, output)
    plan_files.check_files(request, output)
    return api.with_plan(request, plan_files.HINTS, terminal.warn, to_train=to_train)


def _decide(rehearsals: api.Rehearsals, request: api.RunRequest, output: flags.Output, *, to_train: bool) -> Plan:
    """Plans, with a progress line on stderr, and writes the plan to the ``--out`` file, if any."""
    console = terminal.Console(stderr=True)
    if request.plan is None:
        _say_example(console, rehearsals, to_train=to_train)
    again = plan_files.command(rehearsals.job, request.autofit, out=str(request.autofit.plan))
    with terminal.SearchProgress(console, rehearsals.job, rehearsals.defaults) as progress:
        reports = (progress.tried, progress.counting)
        chosen = api.plan(
            rehearsals, *reports, to_train=to_train, simulate=request.simulate, earlier=request.plan, again=again
        )
    if output.json:  # elsewhere they were printed before
        chosen = replace(chosen, warnings=(*request.config_notes, *chosen.warnings))
    if output.out is not None:
        plan_files.write(chosen, output.out)
    return chosen


def train(workers: api.Workers, request: api.RunRequest, output: flags.Output) -> int:
    """Runs ``autofit METHOD``: plans, and trains with the plan."""
    request = api.resumed(
        request, terminal.warn, lambda folder: terminal.warn(f"continuing the run in {folder}, with its plan")
    )
    to_train = not (request.plan_only or output.stops)
    request = _checked(request, output, to_train=to_train)
    with api.leading(request, lambda line: terminal.say(terminal.Console(stderr=True), line)) as machines:
        with workers:  # the workers end before the training begins
            with _waiting("importing TRL, looking at model and data") as (_, note):
                rehearsals = api.begin(workers, request, note, to_train=to_train, machines=machines)
            chosen = _decide(rehearsals, request, output, to_train=to_train)
            if output.stops:
                return plan_files.write_export(rehearsals, chosen, request, output)
        if request.plan_only:
            return _print_plan(chosen, request, output)
        console = terminal.lasting_console(stderr=output.json)
        earlier = request.plan if request.argument("resume_from_checkpoint") else None
        if earlier is None or (earlier.knobs, earlier.warnings) != (chosen.knobs, chosen.warnings):
            console.print(explain_view(chosen) if output.verbose else first_screen(chosen))
        pages: list[str] = []
        with terminal.TrainingProgress(console, budget_bytes=chosen.estimate.reservable_bytes, pages=pages) as progress:
            report = api.train(rehearsals, chosen, request, progress.on_event, machines=machines)
        if output.out is not None:
            plan_files.refresh(output.out, report.output_dir)
        if output.json:
            kept = Plan.load(report.output_dir)  # includes what the run measured
            return _print_json({"schema": "autofit.fit/1", "plan": codec.to_json(kept), "run": codec.to_json(report)})
        console.print(report_view(report, page=pages[-1] if pages else None))
        return 0


def gpus(argv: Sequence[str]) -> int:
    """Runs ``autofit gpus``: lists the GPUs in the catalog."""
    parser = CommandParser("gpus", "The GPUs that --gpu knows by name, with their sources.\n")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.read(argv)
    cards = api.catalog()
    if options.json:
        return _print_json({"schema": "autofit.gpus/1", "gpus": [codec.to_json(card) for card in cards]})
    terminal.whole_lines().print(gpus_view(cards))
    return 0


@contextmanager
def _waiting(what: str) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Shows what the command is doing; yields functions that change this text and collect notes for the end."""
    notes: list[str] = []
    try:
        with terminal.LiveLine(terminal.Console(stderr=True), what) as line:
            yield line.show, notes.append
    finally:
        for note in notes:
            terminal.warn(note)


def _say_example(console: terminal.Console, rehearsals: api.Rehearsals, *, to_train: bool) -> None:
    example = api.example_dataset(rehearsals.job)
    if example is not None and api.reads_dataset(rehearsals.job, to_train=to_train):
        console.print(f"No --dataset is given: planned for rows like those of TRL's example, {example}.")


def _print_plan(chosen: Plan, request: api.RunRequest, output: flags.Output) -> int:
    if output.json:
        return _print_json(codec.to_json(chosen))
    # The command that trains with this plan: with the plan's file, or with the user's own flags.
    data = "" if chosen.job.names_data else " --dataset DATA"
    typed = [word for word in output.typed if word != "--plan_only"]
    kept = without_flags(typed, ("tokens", *([] if request.simulate else ["gpu"])))  # trains on this machine's card
    words = kept if output.out is None else ("--plan", output.out)
    to_train = f"{shlex.join(['autofit', chosen.method, *words])}{data}"
    view = explain_view(chosen) if output.verbose else first_screen(chosen, to_train)
    terminal.Console().print(view)
    return 0


def _print_json(payload: Mapping[str, Any]) -> int:
    plain = json.loads(json.dumps(payload), parse_constant=str)  # JSON has no NaN: a diverged loss is the text "NaN"
    sys.stdout.write(json.dumps(plain, indent=2) + "\n")
    return 0
