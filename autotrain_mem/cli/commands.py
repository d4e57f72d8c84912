"""The subcommands: each reads its flags, asks the api, and prints what came of it."""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from autotrain_mem import api
from autotrain_mem.cli import export, flags, plan_files, sweep
from autotrain_mem.cli.terminal import whole_lines
from autotrain_mem.errors import UsageError
from autotrain_mem.report.attempts import attempts_view
from autotrain_mem.report.console import gpus_view, report_view
from autotrain_mem.report.estimate import estimate_view
from autotrain_mem.report.events import event_line
from autotrain_mem.report.gpu_comparison import CardsProgress, cards_view
from autotrain_mem.report.plan import plan_view
from autotrain_mem.report.progress import SearchProgress, TrainingProgress
from autotrain_mem.report.snapshot import check_snapshot, snapshot_view
from autotrain_mem.report.sweep import sweep_csv, sweep_view
from autotrain_mem.spec import Hardware, Plan
from autotrain_mem.spec.report import REWARD_NAMES
from autotrain_mem.spec.sweep import Sweep, SweepPoint


def estimate(method: str, argv: Sequence[str]) -> int:
    """``autofit estimate METHOD``: one configuration exactly as given, or each of a sweep."""
    own = flags.read(f"autofit estimate {method}", argv)
    axes = sweep.read_axes(own, argv)
    snapshot = None if own.snapshot is None else pathlib.Path(own.snapshot)
    if snapshot is not None:
        check_snapshot(snapshot)
    with api.Workers(None if axes else 1) as workers:
        if own.help:
            return _help(workers, method, f"autofit estimate {method}")
        if axes:
            swept = sweep.run(workers, own, method, axes, lambda point: _rehearsals(workers, point, method))
            return _print_sweep(swept, own)
        found = api.estimate(_rehearsals(workers, own, method), snapshot)
    if own.json:
        _print_json(found.to_json())
    elif own.csv:
        _print_csv(Sweep(axes=(), points=(SweepPoint(settings=(), outcome=found),)))
    else:
        Console().print(estimate_view(found))
    if snapshot is not None:
        whole_lines(stderr=True).print(snapshot_view(snapshot, found))
    return 0


def plan(method: str, argv: Sequence[str]) -> int:
    """``autofit plan METHOD``: the best configuration that fits."""
    own = flags.read(f"autofit plan {method}", argv)
    export.check(own, method)
    made = plan_files.read(own, method)
    own = plan_files.laid_over(own, made, to_train=False)
    with api.Workers() as workers:
        if own.help:
            return _help(workers, method, f"autofit plan {method}")
        if cards := api.several(own.gpu or ""):
            return _compare(workers, own, method, cards)
        rehearsals = _rehearsals(workers, own, method)
        chosen = _decide(rehearsals, own, made, to_train=False)
        if export.stops(own):
            return export.write(rehearsals, chosen, own)
    return _print_plan(chosen, as_json=own.json)


def _decide(rehearsals: api.Rehearsals, own: flags.Own, made: Plan | None, *, to_train: bool) -> Plan:
    """By a search, or by the plan that is given; written to the file that ``--out`` names."""
    if made is None:
        chosen = search(rehearsals, to_train=to_train, simulate=own.simulate)
    else:
        chosen = plan_files.follow(rehearsals, made, own, to_train=to_train)
    if own.out is not None:
        plan_files.write(chosen, own.out)
    return chosen


def _compare(workers: api.Workers, own: flags.Own, method: str, cards: Sequence[Hardware]) -> int:
    """``autofit plan METHOD --gpu all``: what each card can do."""
    rehearsals = _rehearsals(workers, replace(own, gpu=cards[0].name), method)
    console = Console(stderr=True)
    _say_example(console, rehearsals, to_train=False)
    with CardsProgress(console, len(cards)) as progress:
        compared = api.cards(rehearsals, cards, progress.tried, progress.counting)
    if own.json:
        return _print_json(compared.to_json())
    whole_lines().print(cards_view(compared))
    return 0


def train(method: str, argv: Sequence[str]) -> int:
    """``autofit METHOD``: plan, and train with the plan."""
    own = plan_files.of_own_run(flags.read(f"autofit {method}", argv), method, warn)
    export.check(own, method)
    made = plan_files.read(own, method)
    stops = own.plan_only or export.stops(own)
    own = plan_files.laid_over(own, made, to_train=not stops)
    with api.Workers() as workers:
        if own.help:
            return _help(workers, method, f"autofit {method}")
        rehearsals = _rehearsals(workers, own, method)
        if not stops:
            overwrites = own.overwrite_output_dir
            api.check_can_train(rehearsals, simulate=own.simulate, overwrite_output_dir=overwrites)
        chosen = _decide(rehearsals, own, made, to_train=not stops)
        if export.stops(own):
            return export.write(rehearsals, chosen, own)
    if own.plan_only:
        return _print_plan(chosen, as_json=own.json)
    console = Console(stderr=own.json)
    console.print(plan_view(chosen))
    if own.overwrite_output_dir and (aside := api.move_aside(rehearsals.job)):
        console.print(Text(f"The run that was there is now in {aside}."), soft_wrap=True)
    with progress_bar(console, rehearsals) as on_event:
        if not own.no_probe:
            chosen = api.confirm(
                rehearsals, chosen, simulate=own.simulate, may_move=made is None, on_event=probe_teller(console)
            )
        report = api.fit(rehearsals, chosen, simulate=own.simulate, max_restarts=own.max_restarts, on_event=on_event)
    if own.json:
        kept = Plan.load(report.output_dir)  # with what the run taught
        return _print_json({"schema": "autofit.fit/1", "plan": kept.to_json(), "run": report.to_json()})
    console.print(report_view(report))
    return 0


def gpus(argv: Sequence[str]) -> int:
    """``autofit gpus``: the catalog."""
    own = flags.read("autofit gpus", argv)
    if own.rest:
        raise UsageError(f"autofit gpus takes no {own.rest[0]}.", hint="autofit gpus [--json]")
    cards = api.gpus()
    if own.json:
        return _print_json({"schema": "autofit.gpus/1", "gpus": [card.to_json() for card in cards]})
    whole_lines().print(gpus_view(cards))
    return 0


def _rehearsals(workers: api.Workers, own: flags.Own, method: str) -> api.Rehearsals:
    return api.rehearsals_for(workers, own.words(method), own.headroom_bytes, warn)


def warn(message: str) -> None:
    """Something that the user should know, and that stops nothing."""
    Console(stderr=True).print(f"note: {message}", style="dim", highlight=False)


def search(rehearsals: api.Rehearsals, *, to_train: bool, simulate: bool = False) -> Plan:
    """Plan with a live line on stderr; say so when the data are TRL's example."""
    console = Console(stderr=True)
    _say_example(console, rehearsals, to_train=to_train)
    with SearchProgress(console) as progress:
        return api.plan(rehearsals, progress.tried, progress.counting, to_train=to_train, simulate=simulate)


def _say_example(console: Console, rehearsals: api.Rehearsals, *, to_train: bool) -> None:
    example = api.example_dataset(rehearsals.job)
    if example is not None and api.reads_dataset(rehearsals.job, to_train=to_train):
        console.print(f"No --dataset given: TRL's own example it is, {example}.")


def _print_plan(chosen: Plan, *, as_json: bool) -> int:
    if as_json:
        return _print_json(chosen.to_json())
    console = Console()
    console.print(plan_view(chosen))
    console.print()
    console.print(attempts_view(chosen))
    return 0


@contextmanager
def progress_bar(console: Console, rehearsals: api.Rehearsals) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Draws the events of a run as a progress bar; yields what takes them."""
    started = time.monotonic()
    loss: float | None = None
    reward: float | None = None
    with TrainingProgress(console, budget_bytes=rehearsals.budget_bytes) as progress:

        def on_event(event: Mapping[str, Any]) -> None:
            nonlocal started, loss, reward
            if event["event"] == "start":
                started = time.monotonic()
                progress.start(event["total_steps"])
            elif event["event"] == "interrupted":
                console.print("Interrupted: training ends after this step; Ctrl-C again ends it now.")
            elif event["event"] == "log":
                loss = event["logs"].get("loss", loss)
                reward = next((event["logs"][name] for name in REWARD_NAMES if name in event["logs"]), reward)
            elif event["event"] == "step":
                seconds = time.monotonic() - started
                peak = None if event["memory"] is None else event["memory"]["peak_reserved_bytes"]
                progress.advance(event["step"], loss, peak, seconds, reward)
                loss = reward = None
            elif line := event_line(event):
                console.print(Text(line), soft_wrap=True)

        yield on_event


def probe_teller(console: Console) -> Callable[[Mapping[str, Any]], None]:
    """Tells of probes as they go, a line for each."""

    def tell(event: Mapping[str, Any]) -> None:
        line = event_line(event)
        if line:
            console.print(Text(line), soft_wrap=True)

    return tell


def _print_sweep(swept: Sweep, own: flags.Own) -> int:
    if own.json:
        return _print_json(swept.to_json())
    if own.csv:
        return _print_csv(swept)
    whole_lines().print(sweep_view(swept))
    return 0


def _print_csv(swept: Sweep) -> int:
    sys.stdout.write(sweep_csv(swept))
    return 0


def _help(workers: api.Workers, method: str, prog: str) -> int:
    trls = workers.first.help_text(method)
    sys.stdout.write(flags.make_parser(prog).format_help())
    sys.stdout.write(f"\nTRL's own flags; what cannot be rehearsed is refused, with what to do instead:\n\n{trls}")
    return 0


def _print_json(payload: Mapping[str, Any]) -> int:
    plain = json.loads(json.dumps(payload), parse_constant=str)  # JSON has no NaN: a diverged loss is the text "NaN"
    sys.stdout.write(json.dumps(plain, indent=2) + "\n")
    return 0
