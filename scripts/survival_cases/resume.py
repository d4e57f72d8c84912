"""Resumes killed runs on other GPUs and with other sharding, and compares them with undisturbed runs.

The model has 2 layers in float32; a step has 8 rows, and no two rows are equally long. For each beginning, one run is
undisturbed. Another is killed while it writes its second checkpoint, in step 6 of 8. It is resumed from step 3, only
with ``--resume_from_checkpoint --gpus N --sharding S``. What cannot be resumed is rejected before planning.
"""

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
"""The largest relative difference of a loss: float32 summed in another order, logged with about four more digits."""
AT_ONCE_SECONDS = 3.0
"""The time limit of a refusal, in which Python starts twice without slow imports."""

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
    """One run that begins in one way and is resumed in another: ``fsdp2 4`` is FSDP2 on 4 GPUs."""

    mode: str
    begins: str
    goes_on: str
    is_refused: bool = False

    def __str__(self) -> str:
        return f"{self.mode} {self.begins} > {self.goes_on}"


def cases() -> list[Case]:
    """Returns all pairs with full fine-tuning and LoRA; those that are refused only with full fine-tuning."""
    every = []
    for mode in MODES:
        for pair in (*GOES_ON, *(REFUSED if mode == "full" else ())):
            begins, goes_on = pair.split(" > ")
            every.append(Case(mode=mode, begins=begins, goes_on=goes_on, is_refused=pair in REFUSED))
    return every


def shared(how: str) -> list[str]:
    """Returns the flags for a text such as ``ddp 2``."""
    sharding, gpus = how.split()
    return ["--gpus", gpus, *(["--sharding", sharding] if sharding != "alone" else [])]


def write_rows(path: pathlib.Path) -> None:
    """Writes rows, no two of which are equally long."""
    random = Random(0)
    words = random.sample(range(8, 8 + ROWS), ROWS)
    word_problems.write_rows(path, [material.row_of(random, "text", count) for count in words])


def flags(mode: str, how_shared: str) -> list[str]:
    """Returns the command that begins a run."""
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
    """Returns the folder of the run that is killed while it writes its second checkpoint; makes the run if needed."""
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
    """Runs one case, from a copy of the killed run."""
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
    """Compares a resumed run's figures with the undisturbed run's."""
    losses = now["losses"].items()
    apart = max(abs(loss - quiet["losses"][step]) / abs(quiet["losses"][step]) for step, loss in losses)
    same = {name: now[name] == quiet[name] for name in ("rows", "steps", "tokens")}
    is_same = all(same.values()) and len(losses) == STEPS and apart <= TOLERANCE
    return {"outcome": "the same" if is_same else "changed", **same, "loss_error": apart, "effective": now["rows"]}


def table(rows: Mapping[str, Row]) -> list[str]:
    counts = f"{'batch':>6} {'steps':>6} {'rows':>6}"
    lines = [f"{'begun with > resumed with':28} {'outcome':12} {counts} {'loss off by':>12} {'s':>6}"]
    for name, row in rows.items():
        if "loss_error" not in row:
            lines.append(f"{name:28} {row['outcome']}, {row['seconds']} s: {row['error'].splitlines()[:1]}")
            continue
        same = " ".join(f"{'same' if row[key] else 'OTHER':>6}" for key in ("rows", "steps", "tokens"))
        lines.append(f"{name:28} {row['outcome']:12} {same} {row['loss_error']:12.1e} {row['seconds']:6.1f}")
    return lines


def run_all(only: str, place: pathlib.Path, processes: int) -> Mapping[str, Row]:
    """Makes the undisturbed runs, the killed runs, and the resumed ones; returns the rows of the latter."""
    if not (place / LENGTHS).is_file():
        write_rows(place / LENGTHS)
    chosen = {str(case): case for case in cases() if only in str(case)}
    quiet = Kept(place / "resume_undisturbed.json")
    beginnings = {f"{case.mode} {case.begins}": case for case in chosen.values() if not case.is_refused}
    quiet.fill(beginnings, lambda name: undisturbed(beginnings[name].mode, beginnings[name].begins, place), processes)
    for case in chosen.values():  # sequentially, since several cases resume the same run
        cut_short(case.mode, case.begins, place)

    def tried(name: str) -> Row:
        case = chosen[name]
        return run(case, {} if case.is_refused else quiet[f"{case.mode} {case.begins}"], place)

    return Kept(place / "resume.json").fill(chosen, tried, processes)
