"""Resumes killed runs on other GPUs and under other shardings, and compares them with undisturbed runs.

A model of 2 layers in float32 and 8 rows in each step, no two rows equally long. One run of each beginning is
undisturbed. Another is killed as it writes its second checkpoint, in step 6 of 8, and is resumed from step 3 by
``--resume_from_checkpoint --gpus N --sharding S`` alone. What cannot be resumed is rejected before anything is planned.
"""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from autotrain_mem.cli import word_problems
from autotrain_mem.machine.fault_injection import VARIABLE
from survival_cases import jobs, material
from survival_cases.command import Ended, autofit
from survival_cases.kept import Kept, Row

STEPS, SAVED, BATCH = 8, 3, 8
ROWS, LENGTHS = 96, "of_other_lengths.jsonl"
CARD = "2GiB"
TOLERANCE = 1e-4
"""Of a loss, relative: float32 summed in another order, logged with about four digits more."""
AT_ONCE_SECONDS = 3.0
"""Within which a refusal has come: Python starts twice, and nothing is imported that takes longer."""


GOES_ON = (
    *("ddp 4 > ddp 2", "ddp 2 > ddp 4", "alone 1 > ddp 2", "ddp 2 > alone 1"),
    *("fsdp2 4 > fsdp2 2", "fsdp2 2 > fsdp2 4"),
    *("ddp 2 > fsdp2 2", "ddp 4 > fsdp2 2", "ddp 2 > fsdp2 4", "alone 1 > fsdp2 2"),
    *("fsdp2 2 > ddp 2", "fsdp2 4 > ddp 2", "fsdp2 2 > alone 1"),
    *("zero3 2 > zero3 2", "zero2 2 > zero2 2"),
)
REFUSED = ("ddp 2 > ddp 3", "ddp 2 > zero3 2", "fsdp2 2 > zero2 2", "zero3 2 > zero3 4", "zero2 2 > fsdp2 4")
MODES = ("full", "LoRA")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run that begins in one way and goes on in another: ``fsdp2 4`` is FSDP2 on 4 GPUs."""

    mode: str
    begins: str
    goes_on: str
    is_refused: bool = False

    def __str__(self) -> str:
        return f"{self.mode} {self.begins} > {self.goes_on}"


def cases() -> list[Case]:
    """All pairs, each in full and with LoRA; what is refused is so in full."""
    every = []
    for mode in MODES:
        for pair in (*GOES_ON, *(REFUSED if mode == "full" else ())):
            begins, goes_on = pair.split(" > ")
            every.append(Case(mode=mode, begins=begins, goes_on=goes_on, is_refused=pair in REFUSED))
    return every


def shared(how: str) -> list[str]:
    """The flags of ``ddp 2`` and its like."""
    sharding, gpus = how.split()
    return ["--gpus", gpus, *(["--sharding", sharding] if sharding != "alone" else [])]


def write_rows(path: pathlib.Path) -> None:
    """Writes rows of which no two are equally long."""
    random = Random(0)
    words = random.sample(range(8, 8 + ROWS), ROWS)
    word_problems.write_rows(path, [material.row_of(random, "text", count) for count in words])


def flags(mode: str, how_shared: str) -> list[str]:
    """The command that begins a run."""
    sizes = f"--per_device_train_batch_size 2 --effective_batch_size {BATCH} --max_steps {STEPS} --save_steps {SAVED}"
    how = f"--max_length 128 --bf16 false --gpu {CARD} --simulate --no_probe --max_restarts 0 --logging_steps 1"
    what = f"--model model --dataset {LENGTHS} --learning_rate 1e-3 --fit lossless {jobs.MODES[mode]}"
    return ["sft", *f"{what} {sizes} {how}".split(), *shared(how_shared)]


def undisturbed(mode: str, begins: str, place: pathlib.Path) -> Row:
    ended = autofit(flags(mode, begins), place, f"quiet-{mode}-{begins}".replace(" ", "-"), {})
    if not ended.finished:
        raise RuntimeError(f"the undisturbed run {mode} {begins} failed: {ended.error or ended.code}")
    return {"outcome": "undisturbed", **figures(ended)}


def cut_short(mode: str, begins: str, place: pathlib.Path) -> pathlib.Path:
    """The folder of the run that is killed as it writes its second checkpoint."""
    folder = place / "runs" / f"cut-{mode}-{begins}".replace(" ", "-")
    if not (folder / f"checkpoint-{SAVED}").is_dir():
        ended = autofit(flags(mode, begins), place, folder.name, {VARIABLE: "kill:save:2"})
        if ended.finished or not (folder / f"checkpoint-{SAVED}").is_dir():
            raise RuntimeError(f"the run {mode} {begins} was not cut short: {ended.error or ended.code}")
    return folder


def figures(ended: Ended) -> Row:
    """Returns what is compared: the rows of a step, the number of steps, and each step's token count and loss."""
    assert ended.told is not None
    knobs = ended.told["plan"]["knobs"]
    rows = knobs["per_device_train_batch_size"] * knobs["gradient_accumulation_steps"] * knobs["processes"]
    history = {entry["step"]: entry for entry in ended.state()["log_history"] if "loss" in entry}
    return {
        "rows": rows,
        "steps": ended.told["run"]["steps"],
        "tokens": {str(step): entry["num_tokens"] for step, entry in history.items()},
        "losses": {str(step): entry["loss"] for step, entry in history.items()},
    }


def run(case: Case, quiet: Row, place: pathlib.Path) -> Row:
    """One case, from a copy of the run that was cut short."""
    name = f"{case.mode}-{case.begins}-{case.goes_on}".replace(" ", "-")
    folder = place / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(cut_short(case.mode, case.begins, place), folder)
    argv = ["sft", "--simulate", "--no_probe", "--resume_from_checkpoint", *shared(case.goes_on)]
    ended = autofit(argv, place, name, {}, folder=folder)
    row: Row = {"seconds": round(ended.seconds, 1)}
    if case.is_refused:
        at_once = ended.is_reported and ended.seconds <= AT_ONCE_SECONDS
        return {"outcome": "refused" if at_once else "not refused at once", "error": ended.error[:500], **row}
    if not ended.finished:
        return {"outcome": "died", "error": (ended.error or str(ended.code))[:500], **row}
    return {**judged(figures(ended), quiet), **row}


def judged(now: Row, quiet: Row) -> Row:
    """What came of it, beside the undisturbed run."""
    losses = now["losses"].items()
    apart = max(abs(loss - quiet["losses"][step]) / abs(quiet["losses"][step]) for step, loss in losses)
    same = {name: now[name] == quiet[name] for name in ("rows", "steps", "tokens")}
    is_same = all(same.values()) and len(losses) == STEPS and apart <= TOLERANCE
    return {"outcome": "the same" if is_same else "changed", **same, "loss_error": apart, "effective": now["rows"]}


def table(rows: Mapping[str, Row]) -> list[str]:
    counts = f"{'batch':>6} {'steps':>6} {'rows':>6}"
    lines = [f"{'begun and gone on with':28} {'outcome':12} {counts} {'loss off by':>12} {'s':>6}"]
    for name, row in rows.items():
        if "loss_error" not in row:
            lines.append(f"{name:28} {row['outcome']}, {row['seconds']} s: {row['error'].splitlines()[:1]}")
            continue
        same = " ".join(f"{'same' if row[key] else 'OTHER':>6}" for key in ("rows", "steps", "tokens"))
        lines.append(f"{name:28} {row['outcome']:12} {same} {row['loss_error']:12.1e} {row['seconds']:6.1f}")
    return lines


def run_all(only: str, place: pathlib.Path, processes: int) -> Mapping[str, Row]:
    """Runs the undisturbed runs, those that are killed, and what is resumed from them."""
    if not (place / LENGTHS).is_file():
        write_rows(place / LENGTHS)
    chosen = {str(case): case for case in cases() if only in str(case)}
    quiet = Kept(place / "resume_undisturbed.json")
    beginnings = {f"{case.mode} {case.begins}": case for case in chosen.values() if not case.is_refused}
    quiet.fill(beginnings, lambda name: undisturbed(beginnings[name].mode, beginnings[name].begins, place), processes)
    for case in chosen.values():  # one after the other: several cases resume the same run
        cut_short(case.mode, case.begins, place)

    def tried(name: str) -> Row:
        case = chosen[name]
        return run(case, {} if case.is_refused else quiet[f"{case.mode} {case.begins}"], place)

    return Kept(place / "resume.json").fill(chosen, tried, processes)
