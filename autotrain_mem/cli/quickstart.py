"""Runs ``autofit quickstart``: shows the whole product in a minute or two, on a simulated card.

A tiny model on a card of 104 MiB stands for a large model on a real card. With TRL's defaults it trains until a batch
draws the one long row in a hundred, and runs out of memory. Then autofit plans, and the same training runs to its end.
"""

import itertools
import pathlib
import textwrap
import time
from collections.abc import Sequence
from dataclasses import replace

from rich.rule import Rule

from autotrain_mem import api
from autotrain_mem.cli import tiny_model, word_problems
from autotrain_mem.cli.flags import CommandParser, own_names
from autotrain_mem.report.first_screen import estimate_screen, first_screen
from autotrain_mem.report.run_view import report_view
from autotrain_mem.report.terminal import Console, SearchProgress, TrainingProgress
from autotrain_mem.support.errors import AutofitError, GpuOutOfMemoryError, OutputFolderError, UsageError
from autotrain_mem.support.store import Store, cache_folder
from autotrain_mem.types import Job

ABOUT = """\
Shows the whole product in a minute or two, without a GPU: on a simulated card, trains a tiny model with TRL's defaults
until it runs out of memory, then plans what fits and trains to the end.
"""
CARD = "104MiB"
ROWS = 600
STEPS = 60
FLAGS = ("--max_steps", str(STEPS), "--learning_rate", "3e-3", "--logging_steps", "5", "--save_strategy", "no")
"""A short run with TRL's defaults, except that random weights need a higher learning rate than 2e-5."""
NEXT_COMMANDS = """
  autofit plan sft --model Qwen/Qwen2.5-0.5B --gpu rtx3060
      shows what fits, without a GPU
  autofit sft --model Qwen/Qwen2.5-0.5B --dataset DATA
      plans for this machine's GPU, and trains"""


def quickstart(argv: Sequence[str]) -> int:
    """Makes a model and data, shows that TRL's defaults run out of memory, plans, and trains."""
    parser = CommandParser("quickstart", ABOUT)
    parser.add_argument("--folder", metavar="FOLDER", help="a new folder for model, data and run")
    options = parser.read(argv)
    if options.folder is not None and pathlib.Path(options.folder).exists():
        raise UsageError(f"{options.folder} exists already.", hint="Give --folder a new folder.")
    names = itertools.chain(["quickstart-run"], (f"quickstart-run-{number}" for number in itertools.count(2)))
    # the first free name: an earlier quickstart is never overwritten
    folder = pathlib.Path(options.folder or next(name for name in names if not pathlib.Path(name).exists()))
    console = Console()
    api.check_launch()
    started = time.monotonic()
    with api.Workers() as workers:
        workers.start()
        _chapter(console, "1. A tiny model, a tokenizer and 600 word problems, made here and now")
        make_material(folder)
        rows = f"{ROWS} rows, one in a hundred about ten times as long as the rest"
        console.print(f"{folder}/model (1 million weights) and {folder}/data.jsonl ({rows}).")
        argv = [*FLAGS, "--output_dir", str(folder / "run")]
        given, defaults = workers.first.parse("sft", argv, {}, {}, own_names())
        job = Job(method="sft", model=str(folder / "model"), dataset=str(folder / "data.jsonl"), arguments=given)
        card = api.choose(CARD, use_cpu=False)
        store = Store(cache_folder())
        rehearsals = api.Rehearsals(workers=workers, job=job, defaults=defaults, hardware=card, store=store)
        _chapter(console, f"2. TRL's defaults on a card of {CARD}, simulated")
        predicted = api.estimate(rehearsals)
        console.print(estimate_screen(predicted))
        console.print("\nTo show it, a run with these defaults trains until the card is out of memory:")
        arguments = {**rehearsals.job.arguments, "output_dir": str(folder / "trl-defaults")}
        trial = replace(rehearsals, job=replace(rehearsals.job, arguments=arguments))
        try:
            with TrainingProgress(console, budget_bytes=predicted.reservable_bytes) as bar:
                as_given = api.plan_as_given(trial, predicted)
                api.fit(trial, as_given, simulate=True, guarded=False, max_restarts=0, on_event=bar.on_event)
        except GpuOutOfMemoryError as error:
            # Torch's message ends in a URL, which must not be broken.
            lines = textwrap.wrap(error.message, console.width, break_long_words=False, break_on_hyphens=False)
            console.print("\n".join(lines), soft_wrap=True)
        else:
            raise AutofitError(f"TRL's defaults were expected to run out of memory on {CARD}, and did not.")
        _chapter(console, "3. What fits: the real trainer, rehearsed on fake tensors")
        with SearchProgress(Console(stderr=True), rehearsals.job, rehearsals.defaults) as progress:
            chosen = api.plan(rehearsals, progress.tried, progress.counting, to_train=True, simulate=True)
    console.print(first_screen(chosen))
    _chapter(console, f"4. {STEPS} real steps with that plan, on the same card")
    with TrainingProgress(console, budget_bytes=chosen.estimate.reservable_bytes) as bar:
        report = api.fit(rehearsals, chosen, simulate=True, on_event=bar.on_event)
        pages: list[str] = []
        api.write_run_report(folder / "run", store, lambda event: pages.append(str(event.get("path", ""))))
    console.print(report_view(report, page="".join(pages) or None))
    console.print(f"\nAll of it took {time.monotonic() - started:.0f} s. With your own model and data:")
    console.print(NEXT_COMMANDS, soft_wrap=True)  # a command that is wrapped cannot be copied
    return 0


def make_material(folder: pathlib.Path) -> None:
    """Writes the model, the tokenizer and the rows. Raises OutputFolderError if the folder cannot be written."""
    try:
        word_problems.write_rows(folder / "data.jsonl", word_problems.problems(ROWS, seed=0))
        tiny_model.build(folder / "model", word_problems.texts(word_problems.problems(ROWS, seed=0)))
    except OSError as error:
        raise OutputFolderError(
            f"Cannot write to {folder}: {error.strerror or error}.",
            hint="Give --folder a new folder where you can write: autofit quickstart --folder FOLDER",
        ) from error


def _chapter(console: Console, title: str) -> None:
    console.print()
    console.print(Rule(title, align="left", style="dim"))
