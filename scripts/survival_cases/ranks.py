"""What goes wrong with one of two simulated ranks, at 10 random moments each, under DDP and under FSDP2 in turn.

Losses are held against those of the undisturbed run, as in ``survival_cases/faults.py``; without bf16 here, in which
FSDP2 logs them. Nothing may be left over: every rank holds the lock on the output folder until it has ended.
"""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from autotrain_mem import api
from autotrain_mem.machine.fault_injection import COUNT, MARKS_NAME, VARIABLE
from autotrain_mem.support.errors import OutputFolderError
from autotrain_mem.training.run_folder import lock_folder
from survival_cases import faults, from_outside
from survival_cases.command import autofit
from survival_cases.kept import Kept, Row
from survival_cases.sizes import filled_card

MOMENTS = 10
FAULTS = ("oom:backward", "kill", "stop", "disk:save", "SIGTERM")
SHARDINGS = ("ddp", "fsdp2")
WAITED_SECONDS = 12
"""``--ddp_timeout`` of all runs: a rank that is stopped is waited for so long."""
BOUND_SECONDS = 240.0
"""Of a whole command, planning included, whose ranks start twice and wait once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run, and what befalls which of its ranks."""

    fault: str
    number: int
    sharding: str
    mishap: str

    def __str__(self) -> str:
        return f"{self.fault} {self.number:02} {self.sharding}"


def flags(sharding: str) -> list[str]:
    """Of a short run: 12 steps of 8 rows, a checkpoint every 4."""
    kind = f"--dataset short_text --effective_batch_size 8 --bf16 false --ddp_timeout {WAITED_SECONDS}"
    return f"{faults.SHARED} {kind} --gpus 2 --sharding {sharding}".split()


def undisturbed(workers: api.Workers, place: pathlib.Path, kept: Kept) -> dict[str, faults.Undisturbed]:
    """By sharding; planned and trained once."""

    def trained(sharding: str) -> Row:
        card = filled_card(workers, "sft", flags(sharding), faults.SHARE)
        argv = ["sft", *flags(sharding), "--gpu", card, "--simulate", "--no_probe"]
        ended = autofit(argv, place, f"two-{sharding}", {VARIABLE: COUNT})
        if not ended.finished:
            raise RuntimeError(f"the undisturbed run of {sharding} failed: {ended.error or ended.code}")
        lines = [line.split() for line in (ended.folder / MARKS_NAME).read_text().splitlines()]
        counts = {name if unit == "allocations" else unit: int(number) for name, number, unit in lines}
        losses = {str(step): loss for step, loss in ended.losses().items()}
        return {"card": card, "losses": losses, "counts": counts, "outcome": "undisturbed"}

    rows = kept.fill(SHARDINGS, trained, processes=1)
    return {sharding: _undisturbed(row) for sharding, row in rows.items()}


def _undisturbed(row: Row) -> faults.Undisturbed:
    losses = {int(step): loss for step, loss in row["losses"].items()}
    return faults.Undisturbed(card=row["card"], losses=losses, counts=row["counts"])


def cases(quiet: Mapping[str, faults.Undisturbed]) -> list[Case]:
    """50: each rank in turn; a disk is full for the first, which alone writes the file where it breaks off."""
    random = Random(0)
    every = []
    for fault in FAULTS:
        for number in range(MOMENTS):
            sharding, rank = SHARDINGS[number % 2], number // 2 % 2
            mishap = _drawn(random, fault, quiet[sharding])
            whose = f"rank:{rank}:" if rank and fault not in ("disk:save", "SIGTERM") else ""
            every.append(Case(fault=fault, number=number, sharding=sharding, mishap=whose + mishap))
    return every


def _drawn(random: Random, fault: str, quiet: faults.Undisturbed) -> str:
    if fault == "SIGTERM":
        return f"step:{random.randint(1, max(quiet.losses) - 1)}"
    if fault == "disk:save":
        return f"{fault}:{random.randint(1, quiet.counts['checkpoints'])}"
    return f"{fault}:{random.randint(1, quiet.counts['backward' if fault.startswith('oom') else 'all'])}"


def run(case: Case, quiet: Mapping[str, faults.Undisturbed], place: pathlib.Path) -> Row:
    """One case, with the plan of the undisturbed run."""
    still, name = quiet[case.sharding], f"two-{case.fault}-{case.number:02}".replace(":", "-")
    argv = ["sft", "--plan", f"runs/two-{case.sharding}", "--simulate", "--no_probe"]
    argv += ["--ddp_timeout", str(WAITED_SECONDS)]
    stopped = ""
    if case.fault == "SIGTERM":
        step = int(case.mishap.partition(":")[2])
        first, ended = from_outside.hang_up(argv, place, name, step=step, number=signal.SIGTERM)
        came, stopped = not first.finished, first.error
    else:
        ended = autofit(argv, place, name, {VARIABLE: case.mishap})
        marks = ended.folder / MARKS_NAME
        came = marks.is_file() and bool(marks.read_text().strip())
    row = faults.judged(ended, came=came, losses=still.losses)
    if is_left_over(ended.folder):
        row["outcome"] = "left over"
    elif ended.seconds > BOUND_SECONDS:
        row["outcome"] = "too late"
    return {"mishap": case.mishap, "seconds": round(ended.seconds, 1), "stopped": stopped[:500], **row}


def is_left_over(folder: pathlib.Path) -> bool:
    """Whether a process of a run that has ended is still there."""
    try:
        with lock_folder(str(folder)):
            return False
    except OutputFolderError:
        return True
