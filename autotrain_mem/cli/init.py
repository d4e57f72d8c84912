"""Runs ``autofit init``: writes a config of about ten lines, from the data, this machine and the user's answers."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotrain_mem import api
from autotrain_mem.cli.flags import CommandParser
from autotrain_mem.methods.interface import method_of
from autotrain_mem.report.terminal import warn
from autotrain_mem.support.errors import (
    AutofitError,
    DatasetFormatError,
    OutputFolderError,
    UsageError,
)
from autotrain_mem.support.files import refusal
from autotrain_mem.support.sources import DATA_KINDS
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types.methods_table import METHODS, TEXT_COLUMN, methods_reading

ABOUT = """\
Writes a config for `autofit METHOD --config FILE`, with comments: the method that fits the columns of the data, and
this machine's card. On a terminal it asks for what no flag gives; elsewhere the flags are required. An existing file is
never overwritten.
"""
FILE = "autofit.yaml"
MODEL = "Qwen/Qwen2.5-0.5B"
"""The suggested model: small, and usable with every method."""
COMMENT_COLUMN = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Holds what a config is made from."""

    method: str
    model: str
    dataset: str
    columns: tuple[str, ...]
    """The data's columns; empty if the data were not read."""
    rows: int | None
    gpu: str | None
    """A card by name; None for this machine's card."""
    here: str | None
    """Names of this machine's cards; None if it has none."""


def init(argv: Sequence[str]) -> int:
    """Writes the config and prints the next command. Raises UsageError, DatasetError and OutputFolderError."""
    parser = CommandParser("init", ABOUT)
    parser.add_argument("--model", metavar="MODEL", help="a hub id or a folder")
    parser.add_argument("--dataset", metavar="DATA", help="a hub id, a folder, or a .json, .jsonl, .parquet, .csv file")
    parser.add_argument("--method", choices=[*METHODS], help="default: what the columns of the data are for")
    parser.add_argument(
        "--gpu", metavar="NAME", help="plan for this card (autofit gpus); default: the one that is here"
    )
    parser.add_argument("--out", metavar="FILE", default=FILE, help=f"the file to write (default {FILE})")
    options = parser.read(argv)
    out = Path(options.out)
    if out.exists():
        raise OutputFolderError(f"{out} exists, and is not written over.", hint="Give --out another name.")
    if options.gpu is not None:
        api.choose(options.gpu, use_cpu=False)  # raises for an unknown card

    def ask(question: str, default: str) -> str:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            needed = [f"--{name}" for name in ("model", "dataset") if not getattr(options, name)]
            raise UsageError(
                f"autofit init cannot ask questions here, and needs {' and '.join(needed)}.",
                hint="autofit init --model MODEL --dataset DATA [--method METHOD] [--gpu NAME]",
            )
        shown = f" [{default}]" if default else ""
        while True:
            if answer := input(f"{question}{shown}: ").strip() or default:
                return answer

    answers = answered(options.model, options.dataset, options.method, options.gpu, ask)
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(config_text(answers, str(out)))
    except OSError as error:
        raise refusal(out, error, "--out a file") from error
    sys.stdout.write(f"{out} is written. Next:\n  {next_command(answers, str(out))}\n")
    return 0


Ask = Callable[[str, str], str]
"""``ask(question, default)`` returns the user's answer; an empty line means the default."""


def answered(model: str | None, dataset: str | None, method: str | None, gpu: str | None, ask: Ask) -> Answers:
    """Returns the answers: the flags, and for what they leave open the data, this machine and ``ask``."""
    model = model or ask("Model, a hub id or a folder", MODEL)
    dataset = dataset or ask("Data, a file, a folder or a hub id", "")
    columns: tuple[str, ...] = ()
    rows = None
    if method is None or Path(dataset).suffix.lower() in DATA_KINDS:  # loads the first split as a training loads it
        import datasets

        from autotrain_mem.data.load import load_named

        datasets.disable_progress_bars()
        path = Path(dataset).expanduser()
        split = next(iter(load_named(str(path) if path.exists() else dataset, None).values()))
        columns, rows = tuple(split.column_names), len(split)
    likely = methods_reading(columns)
    if method is None and not likely:
        reads = "\n".join(
            f"{row.name}: {' or '.join('+'.join(each) for each in row.formats if each != (TEXT_COLUMN,))}"
            for row in METHODS.values()
        )
        raise DatasetFormatError(
            f"The columns of {dataset} ({', '.join(columns)}) are those of no method.",
            hint=f"Rename them, or give --method, if TRL makes rows of them that it reads:\n{reads}",
        )
    if method is not None and columns and method not in likely:
        warn(f"{method} reads no rows with the columns {', '.join(columns)} as they are: plan says what it needs")
    here = None
    try:
        cards = [f"{card.name}, {format_bytes(card.total_bytes)}" for card in api.detect({}, warn)]
        here = f"{len(cards)} x {cards[0]}" if len(cards) > 1 else next(iter(cards), None)
    except AutofitError as error:  # the config may be for another machine
        warn(error.message)
    method = method or likely[0]
    return Answers(method=method, model=model, dataset=dataset, columns=columns, rows=rows, gpu=gpu, here=here)


def config_text(answers: Answers, file: str) -> str:
    """Returns the config's text: TRL's keys, then ours, with comments."""
    row, columns = METHODS[answers.method], answers.columns
    folder = f"{answers.model.rstrip('/').split('/')[-1]}-{row.title}"
    is_free = "num_generations" not in row.knobs and method_of(row.name).mini_batches({}) is None
    data = ""
    if columns:
        others = [name for name in methods_reading(columns) if name != answers.method][:3]
        also = f"; also for {', '.join(others)}" if others else ""
        data = f"{answers.rows:,} rows with {', '.join(columns[:4])}{also}"
    card = "plans for this card; remove the line to plan for the one that is there"
    if answers.gpu is None:
        card = f"in place of the one that is here: {answers.here}" if answers.here else "there is none here: name one"
    named = {row.reward_model_argument: "a reward model", row.teacher_argument: "a teacher"}
    rate = "TRL's, for all weights; an adapter needs about ten times as much"
    lines = [
        f"# {next_command(answers, file)}",
        f"# autofit {answers.method} --config {shlex.quote(file)}",
        _line("model_name_or_path", answers.model, ""),
        _line("dataset_name", answers.dataset, data),
        _line("output_dir", folder, "model, plan and checkpoints; a run that is there is kept"),
        _line("num_train_epochs", "1", "TRL's default is 3", on=False),
        _line("learning_rate", f"{row.defaults['learning_rate']:.1e}", rate, on=False),
        *(_line(name, "ORG/NAME", f"{what}: put yours") for name, what in named.items() if name is not None),
        "autofit:",
        _line("  effective_batch_size", "8", "rows of an optimizer step, kept by every plan", on=is_free),
        _line("  fit", "all", "lossless: nothing but speed changes; rounding: bf16 weights too; all: LoRA too"),
        _line("  gpu", answers.gpu or "rtx4090", card, on=answers.gpu is not None),
    ]
    return "\n".join(lines) + "\n"


def _line(key: str, value: str, comment: str, *, on: bool = True) -> str:
    """Returns ``key: value # comment``; with ``on=False`` the whole line is a comment."""
    indent, name = key[: len(key) - len(key.lstrip())], key.lstrip()
    is_word = value.lower() in ("yes", "no", "on", "off", "true", "false", "null", "y", "n", "~")
    if is_word or not re.fullmatch(r"[A-Za-z0-9_./~][\w./~+-]*", value):  # YAML would misread it without quotes
        value = json.dumps(value, ensure_ascii=False)
    text = f"{indent}{'' if on else '# '}{name}: {value}"
    return f"{text:{COMMENT_COLUMN}}# {comment}" if comment else text


def next_command(answers: Answers, file: str) -> str:
    """Returns the command that shows the plan; it has ``--gpu NAME`` if no card is here and none was named."""
    gpu = "" if answers.here or answers.gpu else " --gpu NAME"
    return f"autofit plan {answers.method} --config {shlex.quote(file)}{gpu}"
